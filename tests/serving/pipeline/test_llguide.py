"""Masks of grammars: every text that can be walked through them is right, and right texts can be walked."""

import json
import re
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from serving.errors import BadRequest
from serving.pipeline.guide import Form, Grammar, Guide, mask_bytes
from serving.pipeline.llguide import make_guide
from serving.types import Constraint
from tests.fakes_text import BOS, CONTROL, EOS, VOCAB_SIZE, ByteTokenizer

pytest.importorskip("llguidance", reason="guided output is the extra tidegate[guided]")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def guide() -> Guide:
    guide = make_guide(ByteTokenizer(), control_ids=CONTROL.values(), vocab_size=VOCAB_SIZE)
    assert guide is not None
    return guide


def start(guide: Guide, form: Form, text: object) -> Constraint:
    return guide.compile(Grammar(form, text if isinstance(text, str) else json.dumps(text), "field"))()


def allowed(constraint: Constraint) -> list[int]:
    mask = constraint.mask
    assert mask is not None
    assert len(mask) == mask_bytes(VOCAB_SIZE)
    return np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()


def walk(constraint: Constraint, rng: np.random.Generator, most: int = 400) -> str | None:
    """A random text through the masks; None: cut."""
    out = bytearray()
    while constraint.mask is not None:
        token = int(rng.choice(allowed(constraint)))
        assert token not in (set(CONTROL.values()) - {EOS}), "a control token is no text"
        if token == EOS:
            break
        if len(out) == most:
            return None
        out.append(token)
        constraint.push(token)
    return out.decode()


def feed(constraint: Constraint, text: str) -> bool:
    """Whether the masks let the whole text through, to its end."""
    for byte in text.encode():
        if constraint.mask is None or byte not in allowed(constraint):
            return False
        constraint.push(byte)
    return constraint.mask is None or EOS in allowed(constraint)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_random_walks_of_a_schema_are_json_of_it(guide: Guide, seed: int) -> None:
    text = walk(start(guide, Form.JSON_SCHEMA, SCHEMA), np.random.default_rng(seed))
    if text is None:
        return
    value: dict[str, Any] = json.loads(text)
    assert set(value) <= {"name", "age", "tags"}
    assert len(value["name"]) <= 5
    assert 0 <= value["age"] <= 120
    assert type(value["age"]) is int
    assert set(value.get("tags", [])) <= {"a", "b"}
    assert len(value.get("tags", [])) <= 3


@pytest.mark.parametrize(
    ("value", "fits"),
    [
        ({"name": "é😀", "age": 3}, True),
        ({"name": "abc", "age": 120, "tags": ["a", "b", "a"]}, True),
        ({"name": "toolong", "age": 3}, False),
        ({"name": "a", "age": 121}, False),
        ({"name": "a"}, False),
        ({"name": "a", "age": 1, "other": 2}, False),
    ],
)
def test_json_of_a_schema(guide: Guide, value: object, fits: bool) -> None:
    for text in (json.dumps(value, ensure_ascii=False), json.dumps(value, ensure_ascii=False, indent=2)):
        assert feed(start(guide, Form.JSON_SCHEMA, SCHEMA), text) is fits


def test_white_space_comes_to_an_end(guide: Guide) -> None:
    constraint = start(guide, Form.JSON_SCHEMA, {"type": "object"})
    constraint.push(ord("{"))
    for _ in range(20):
        constraint.push(ord(" "))
    assert ord(" ") not in allowed(constraint)


@pytest.mark.parametrize("pattern", [r"[0-9]{2,4}(-[a-f]+)?", r"(yes|no)\!?", r"a/b\n", "日本?", r"\d+\.\d\d"])
def test_random_walks_of_an_expression_match_it(guide: Guide, pattern: str) -> None:
    for seed in range(5):
        text = walk(start(guide, Form.REGEX, pattern), np.random.default_rng(seed), most=60)
        assert text is None or re.fullmatch(pattern, text)


def test_choices(guide: Guide) -> None:
    choices = ["yes", "no", "yes!", 'a"b\\\n', "日本😀", "| (x)"]
    assert all(feed(start(guide, Form.CHOICE, choices), choice) for choice in choices)
    assert not any(feed(start(guide, Form.CHOICE, choices), other) for other in ("", "y", "yesno", "日"))
    ends = start(guide, Form.CHOICE, ["yes", "yes!"])
    for byte in b"yes":
        ends.push(byte)
    assert allowed(ends) == [ord("!"), EOS]


@pytest.mark.parametrize(
    ("form", "text", "says"),
    [
        (Form.REGEX, "[0-9", "unclosed character class"),
        (Form.REGEX, "(?=a)b", "look-around"),
        (Form.REGEX, "(" * 1000 + ")" * 1000, "nested"),
        (Form.JSON_SCHEMA, "{", "EOF"),
        (Form.JSON_SCHEMA, "[]", "object"),
        (Form.JSON_SCHEMA, '{"type": "thing"}', "thing"),
        (Form.JSON_SCHEMA, '{"not": {"type": "string"}}', "not"),
        (Form.JSON_SCHEMA, '{"$ref": "http://example.com/s"}', "http://example.com/s"),
        (Form.JSON_SCHEMA, '{"a":' * 2000 + "1" + "}" * 2000, "recursion"),
        (Form.REGEX, "a" * 300_000, "the most"),
    ],
)
def test_what_is_no_grammar_is_said(guide: Guide, form: Form, text: str, says: str) -> None:
    with pytest.raises(BadRequest, match=re.escape(says)) as caught:
        start(guide, form, text)
    assert caught.value.param == "field"
    assert len(caught.value.message) < 400


def test_a_grammar_beyond_the_librarys_limits_is_the_clients_fault(guide: Guide) -> None:
    constraint = start(guide, Form.REGEX, "[a-z]*" * 2000 + "x")
    with pytest.raises(BadRequest, match="too many"):
        constraint.push(ord("a"))


def test_constraints_of_one_grammar_are_apart(guide: Guide) -> None:
    make = guide.compile(Grammar(Form.REGEX, "abc", "field"))
    one, other = make(), make()
    one.push(ord("a"))
    assert (allowed(one), allowed(other)) == ([ord("b")], [ord("a")])


def test_a_tokenizer_without_an_end_token_has_no_guide() -> None:
    assert make_guide(ByteTokenizer(eos_ids=()), control_ids=(), vocab_size=VOCAB_SIZE) is None


def test_a_vocabulary_larger_than_the_tokenizers(guide: Guide) -> None:
    """Ids that stand for no text are never allowed."""
    assert max(allowed(start(guide, Form.REGEX, "(?s:.)*"))) <= EOS
    assert BOS not in allowed(start(guide, Form.REGEX, "(?s:.)*"))
