import json

import pytest

from serving.transport.openapi import openapi_document
from serving.transport.routes import ENDPOINTS
from tests.fakes_http import Served


def references(node: object) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*(references(value) for value in node.values()))
    if isinstance(node, list):
        return set().union(*(references(value) for value in node))
    return set()


def test_the_document_lists_every_endpoint_and_every_schema_that_it_names(server: Served) -> None:
    document = server.get("/openapi.json").json
    assert document["openapi"].startswith("3.1")
    for endpoint in ENDPOINTS:
        assert (endpoint.method.lower() in document["paths"].get(endpoint.path, {})) == endpoint.documented
    names = {ref.removeprefix("#/components/schemas/") for ref in references(document)}
    assert names == set(document["components"]["schemas"])
    assert {"ScoreInput", "ChatChunk", "ErrorBody"} <= names


def test_fields_and_bounds_are_those_of_the_structs() -> None:
    schemas = openapi_document(ENDPOINTS, "1")["components"]["schemas"]
    assert schemas["CompletionIn"]["required"] == ["prompt"]
    temperature = schemas["CompletionIn"]["properties"]["temperature"]["anyOf"][0]
    assert (temperature["minimum"], temperature["maximum"]) == (0, 2)
    assert schemas["ScoreIn"]["properties"]["inputs"]["items"] == {"$ref": "#/components/schemas/ScoreInput"}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_streams_are_described(path: str) -> None:
    operation = openapi_document(ENDPOINTS, "1")["paths"][path]["post"]
    assert set(operation["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    assert operation["security"] == [{"key": []}]


def test_operation_ids_are_unique_and_the_document_is_json() -> None:
    document = openapi_document(ENDPOINTS, "1")
    ids = [operation["operationId"] for path in document["paths"].values() for operation in path.values()]
    assert len(ids) == len(set(ids))
    json.dumps(document, allow_nan=False)
