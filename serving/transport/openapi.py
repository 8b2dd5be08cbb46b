"""The OpenAPI document, made from the endpoints and the wire structs."""

from collections.abc import Sequence
from typing import Any

import msgspec

from .routes import Endpoint
from .schema.chat import ChatChunk
from .schema.common import ErrorBody
from .schema.score import ScoreInput

_REF = "#/components/schemas/{name}"
_STREAMS = "text/event-stream"


def openapi_document(endpoints: Sequence[Endpoint], version: str) -> dict[str, Any]:
    """OpenAPI 3.1, ready for JSON."""
    shown = [endpoint for endpoint in endpoints if endpoint.documented]
    structs = [struct for e in shown for struct in (e.asked, e.answered) if struct is not None]
    extra = [ErrorBody, ScoreInput, ChatChunk]
    _, components = msgspec.json.schema_components([*structs, *extra], ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in shown:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {"title": "tidegate", "version": version},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "operationId": endpoint.handler.__name__,
        "responses": {"200": _answer(endpoint), "default": _content("An error.", "ErrorBody")},
    }
    if not endpoint.open:
        operation["security"] = [{"key": []}]
    if "{id}" in endpoint.path:
        operation["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    if endpoint.asked is not None:
        operation["requestBody"] = {"required": True, **_content("", endpoint.asked.__name__)}
        del operation["requestBody"]["description"]
    return operation


def _answer(endpoint: Endpoint) -> dict[str, Any]:
    if endpoint.answered is None:
        return {"description": "OK", "content": {"text/plain": {"schema": {"type": "string"}}}}
    answer = _content("OK", endpoint.answered.__name__)
    if endpoint.asked is not None and "stream" in endpoint.asked.__struct_fields__:
        chunk = "ChatChunk" if "chat" in endpoint.path else endpoint.answered.__name__
        answer["content"][_STREAMS] = {"schema": {"$ref": _REF.format(name=chunk)}}
    return answer


def _content(description: str, struct: str) -> dict[str, Any]:
    schema = {"$ref": _REF.format(name=struct)}
    return {"description": description, "content": {"application/json": {"schema": schema}}}
