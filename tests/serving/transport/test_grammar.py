import json

import pytest

from serving.errors import BadRequest
from serving.pipeline.guide import Form, Grammar
from serving.transport.decode import convert
from serving.transport.grammar import read_grammar
from serving.transport.schema.completions import CompletionIn

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def read(**fields: object) -> Grammar | None:
    return read_grammar(convert({"prompt": "a", **fields}, CompletionIn))


def test_any_text() -> None:
    assert read() is None
    assert read(response_format={"type": "text"}, guided_regex=None) is None


def test_every_form() -> None:
    assert read(response_format={"type": "json_object"}) == Grammar(
        Form.JSON_SCHEMA, '{"type": "object"}', "response_format"
    )
    named = {"name": "n", "schema": SCHEMA, "strict": True, "description": "d"}
    by_format = read(response_format={"type": "json_schema", "json_schema": named})
    assert by_format == Grammar(Form.JSON_SCHEMA, json.dumps(SCHEMA), "response_format.json_schema.schema")
    for given in (SCHEMA, json.dumps(SCHEMA)):
        assert read(guided_json=given) == Grammar(Form.JSON_SCHEMA, json.dumps(SCHEMA), "guided_json")
    assert read(guided_regex="[0-9]+") == Grammar(Form.REGEX, "[0-9]+", "guided_regex")
    assert read(guided_choice=["é", "b"]) == Grammar(Form.CHOICE, json.dumps(["é", "b"]), "guided_choice")


@pytest.mark.parametrize("json_schema", [None, {"name": "n"}, {"schema": None}])
def test_json_schema_without_a_schema(json_schema: object) -> None:
    with pytest.raises(BadRequest) as caught:
        read(response_format={"type": "json_schema", "json_schema": json_schema})
    assert caught.value.param == "response_format.json_schema.schema"


def test_two_wishes_at_once() -> None:
    with pytest.raises(BadRequest) as caught:
        read(response_format={"type": "json_object"}, guided_regex="a")
    assert caught.value.param == "guided_regex"
    assert read(response_format={"type": "text"}, guided_regex="a") is not None
