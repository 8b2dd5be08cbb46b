"""Derived words against plain Python."""

import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.words import Word

COLUMNS = frozenset("abc")
NUMBERS = st.fixed_dictionaries({c: st.integers(-1000, 1000) | st.floats(-1e6, 1e6) for c in "abc"})
REFERENCE: dict[str, tuple[Any, Any]] = {
    "sum": ({"sum": ["a", "b", "c"]}, lambda n: n["a"] + n["b"] + n["c"]),
    "mean": ({"mean": ["a", "b", "c"]}, lambda n: statistics.fmean(n.values())),
    "max": ({"max": ["a", "b", "c"]}, lambda n: max(n.values())),
    "min of one": ({"min": ["a"]}, lambda n: n["a"]),
    "subtract": ({"subtract": ["a", "b"]}, lambda n: n["a"] - n["b"]),
    "divide": ({"divide": ["a", "b"]}, lambda n: n["a"] / n["b"] if n["b"] else 0),
    "count_positive": ({"count_positive": ["a", "b", "c"]}, lambda n: len([x for x in n.values() if x > 0])),
    "nested": (
        {"divide": [{"subtract": ["a", {"min": ["b", "c"]}]}, "c"]},
        lambda n: (n["a"] - min(n["b"], n["c"])) / n["c"] if n["c"] else 0,
    ),
    "column": ("b", lambda n: n["b"]),
}


@pytest.mark.parametrize("name", REFERENCE)
@given(numbers=NUMBERS)
def test_operations(name: str, numbers: dict[str, float]) -> None:
    tree, function = REFERENCE[name]
    try:
        expected = function(numbers)
    except OverflowError:
        return
    # Edges half a unit of rounding away from any tie between orders of summation.
    edges = [e for e in (-1e3, -10.5, 0.0, 1.0, 250.25) if abs(e - expected) > 1e-6]
    if abs(expected) < 1e300:
        assert Word("w", tree, edges, COLUMNS).render(numbers) == f"w={sum(e <= expected for e in edges)}"


def test_vocabulary_is_every_text(template_word: Word) -> None:
    assert template_word.vocabulary == ("w=0", "w=1", "w=2")
    numbers = [{"a": v} for v in (-5.0, 0.0, 0.5, 1.0, 9.0)]
    assert [template_word.render(n) for n in numbers] == ["w=0", "w=1", "w=1", "w=2", "w=2"]


@pytest.fixture
def template_word() -> Word:
    return Word("w", "a", [0, 1], frozenset("a"))


def test_no_edges_is_one_word() -> None:
    assert Word("w", "a", [], COLUMNS).render({"a": 3.0}) == "w=0"


@pytest.mark.parametrize(
    ("tree", "numbers"),
    [
        ({"sum": ["a", "b"]}, {"a": 1e308, "b": 1e308}),
        ({"divide": ["a", "b"]}, {"a": 1e308, "b": 1e-308}),
        ({"subtract": [{"subtract": ["a", "b"]}, {"subtract": ["a", "b"]}]}, {"a": 1e308, "b": -1e308}),
    ],
)
def test_numbers_that_grow_out_of_range(tree: Any, numbers: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="word 'w': its columns are too large"):
        Word("w", tree, [0.0], frozenset("ab")).render(numbers)
