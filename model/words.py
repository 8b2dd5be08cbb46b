"""A number as one of a few words: `lim=0` below the first edge, `lim=1` from it on, and so forth.

A word is one token, so a row costs one token a column, and amounts over six orders of magnitude need no digits. The
number is a column or a tree of named operations on columns: `{divide = ["bill_amt_1", "limit_bal"]}`.
"""

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any


def _divide(values: Sequence[float]) -> float:
    numerator, denominator = values
    return numerator / denominator if denominator else 0.0


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _count_positive(values: Sequence[float]) -> float:
    return float(sum(v > 0 for v in values))


# Operation -> (function of the arguments' values, number of arguments; 0: one or more).
_OPERATIONS: Mapping[str, tuple[Callable[[Sequence[float]], float], int]] = {
    "sum": (math.fsum, 0),
    "mean": (_mean, 0),
    "max": (max, 0),
    "min": (min, 0),
    "subtract": (lambda v: v[0] - v[1], 2),
    "divide": (_divide, 2),  # 0 where the divisor is 0
    "count_positive": (_count_positive, 0),
}

_Evaluate = Callable[[Mapping[str, float]], float]


class Word:
    """name: the word's stem. Immutable."""

    def __init__(
        self, name: str, value: str | Mapping[str, Any], edges: Sequence[float], columns: frozenset[str]
    ) -> None:
        """value: a column or {operation: [values]}; edges ascend; columns: those that hold numbers.

        Raises ValueError that starts with the part at fault.
        """
        if not all(map(math.isfinite, edges)) or any(a >= b for a, b in itertools.pairwise(edges)):
            raise ValueError("edges: must be finite and ascend")
        self.name = name
        self.vocabulary = tuple(f"{name}={i}" for i in range(len(edges) + 1))  # in order of the number
        self._edges = tuple(edges)
        self._evaluate = _compile(value, columns)

    def render(self, numbers: Mapping[str, float]) -> str:
        """Raises ValueError where finite columns give a number that is not finite."""
        try:
            number = self._evaluate(numbers)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise ValueError(f"word {self.name!r}: its columns are too large")
        return self.vocabulary[bisect_right(self._edges, number)]


def _compile(tree: Any, columns: frozenset[str]) -> _Evaluate:
    if isinstance(tree, str):
        if tree not in columns:
            raise ValueError(f"value: {tree!r} is not a column of numbers")
        return itemgetter(tree)
    operation, arguments = next(iter(tree.items())) if isinstance(tree, Mapping) and len(tree) == 1 else ("", None)
    if operation not in _OPERATIONS or not isinstance(arguments, list) or not arguments:
        allowed = ", ".join(_OPERATIONS)
        raise ValueError(f"value: got {tree!r}, allowed are a column or one of {{{allowed}}} = [...]")
    function, arity = _OPERATIONS[operation]
    if arity and len(arguments) != arity:
        raise ValueError(f"value: {operation} takes {arity} arguments, got {len(arguments)}")
    if all(isinstance(a, str) for a in arguments) and len(arguments) > 1 and columns.issuperset(arguments):
        columns_of = itemgetter(*arguments)  # the common case, four times as fast
        return lambda numbers: function(columns_of(numbers))
    parts = [_compile(a, columns) for a in arguments]
    return lambda numbers: function([part(numbers) for part in parts])
