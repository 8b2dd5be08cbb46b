"""What a body says about the form of the answer (response_format, guided_json, guided_regex, guided_choice)."""

import json

from serving.errors import BadRequest
from serving.pipeline.guide import Form, Grammar

from .schema.chat import ChatIn
from .schema.common import ResponseFormat
from .schema.completions import CompletionIn

_ANY_OBJECT = '{"type": "object"}'


def read_grammar(body: CompletionIn | ChatIn) -> Grammar | None:
    """None: any text. Raises BadRequest for two wishes at once and for json_schema without a schema."""
    wishes = [
        _response_format(body.response_format),
        None if body.guided_json is None else _json(body.guided_json, "guided_json"),
        None if body.guided_regex is None else Grammar(Form.REGEX, body.guided_regex, "guided_regex"),
        None if body.guided_choice is None else Grammar(Form.CHOICE, json.dumps(body.guided_choice), "guided_choice"),
    ]
    asked = [wish for wish in wishes if wish is not None]
    if len(asked) > 1:
        raise BadRequest(f"{asked[1].param}: not together with {asked[0].param}", param=asked[1].param)
    return asked[0] if asked else None


def _response_format(asked: ResponseFormat | None) -> Grammar | None:
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return Grammar(Form.JSON_SCHEMA, _ANY_OBJECT, "response_format")
    schema = asked.json_schema.schema if asked.json_schema is not None else None
    if schema is None:
        raise BadRequest("response_format.json_schema.schema is required", param="response_format.json_schema.schema")
    return _json(schema, "response_format.json_schema.schema")


def _json(schema: dict[str, object] | str, param: str) -> Grammar:
    return Grammar(Form.JSON_SCHEMA, schema if isinstance(schema, str) else json.dumps(schema), param)
