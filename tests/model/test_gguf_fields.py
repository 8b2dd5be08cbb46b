from typing import Any

import pytest

from model.gguf_fields import GgufFields


def test_values_are_asked_for_by_kind_and_without_the_prefix() -> None:
    fields = GgufFields({"llama.a": 3, "llama.b": 0.5, "llama.c": "x", "llama.d": [4, 4], "other.e": 1}, "llama")
    assert (fields.count("a"), fields.number("b"), fields.text("c", "y"), fields.count("d")) == (3, 0.5, "x", 4)
    assert (fields.count("e", 7), fields.number("a")) == (7, 3.0)
    assert fields.problems + fields.rest(()) == []


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        ("count", 1.5, "a whole number"),
        ("count", -1, "a whole number"),
        ("count", True, "a whole number"),
        ("count", [1, 2], "the same in every layer"),
        ("number", float("inf"), "a finite number"),
        ("number", "1", "a finite number"),
    ],
)
def test_wrong_values_are_problems_and_reading_goes_on(kind: str, value: Any, said: str) -> None:
    fields = GgufFields({"llama.a": value}, "llama")
    assert getattr(fields, kind)("a") == 1
    assert len(fields.problems) == 1
    assert said in fields.problems[0]


def test_a_missing_key_is_named() -> None:
    fields = GgufFields({}, "qwen2")
    fields.count("block_count")
    assert fields.problems == ["key: qwen2.block_count is missing"]


def test_keys_that_nobody_asked_for_are_told_unless_they_change_nothing() -> None:
    keys = {"llama.vocab_size": 9, "llama.expert_count": 0, "llama.attention.causal": True}
    assert GgufFields(keys, "llama").rest(()) == []
    fields = GgufFields({"llama.expert_count": 8, "llama.attention.scale": 0.1, "llama.x.y": 1}, "llama")
    assert [line.split()[1] for line in fields.rest(("llama.x.*",))] == ["llama.attention.scale", "llama.expert_count"]
