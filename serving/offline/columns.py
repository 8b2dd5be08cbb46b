"""The columns of a table that is to be written: the input's, in order, with the type that all of their values have.

Formats with a fixed header need to know before the first row is written; CSV input says its columns in its first line,
JSONL input is read once for them, row by row.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

from .record import Record
from .source import CsvSource, Source

_INT = re.compile(r"-?(0|[1-9]\d{0,17})")
_FLOAT = re.compile(r"-?(0|[1-9]\d*)(\.\d+([eE][-+]?\d+)?|[eE][-+]?\d+)")
_INT64 = range(-(2**63), 2**63)


class Type(Enum):
    EMPTY = 0
    BOOL = 1
    INT = 2
    FLOAT = 3
    TEXT = 4  # anything else; what is no string is written as JSON

    def join(self, other: "Type") -> "Type":
        """The type that holds values of both."""
        if Type.EMPTY in (self, other) or self is other:
            return max(self, other, key=lambda t: t.value)
        return Type.FLOAT if {self, other} == {Type.INT, Type.FLOAT} else Type.TEXT


def find_columns(source: Source) -> dict[str, Type]:
    """Every column of every row. One pass."""
    texts = isinstance(source, CsvSource)
    found: dict[str, Type] = dict.fromkeys(source.columns, Type.EMPTY) if isinstance(source, CsvSource) else {}
    for name, value in _values(source.records()):
        found[name] = found.get(name, Type.EMPTY).join(_text_type(value) if texts else _json_type(value))
    return found


def _values(records: Iterable[Record]) -> Iterable[tuple[str, Any]]:
    for record in records:
        yield from record.values.items()


def _text_type(text: str) -> Type:
    """What a CSV field reads as; 007, nan and whole numbers too long for 64 bits stay text."""
    if text == "":
        return Type.EMPTY
    if _INT.fullmatch(text):
        return Type.INT
    return Type.FLOAT if _FLOAT.fullmatch(text) and math.isfinite(float(text)) else Type.TEXT


def _json_type(value: Any) -> Type:
    if value is None:
        return Type.EMPTY
    if isinstance(value, bool):
        return Type.BOOL
    if isinstance(value, int):
        return Type.INT if value in _INT64 else Type.TEXT
    return Type.FLOAT if isinstance(value, float) else Type.TEXT


def typed(values: Mapping[str, Any], columns: Mapping[str, Type]) -> dict[str, Any]:
    """A row's values as their columns have them; None where there is none."""
    return {name: _typed(values.get(name), kind) for name, kind in columns.items()}


def _typed(value: Any, kind: Type) -> Any:
    if value is None or (value == "" and kind is not Type.TEXT):
        return None
    if kind is Type.INT:
        return int(value)
    if kind is Type.FLOAT:
        return float(value)
    return as_text(value) if kind is Type.TEXT else value


def as_text(value: Any) -> str:
    """Strings as they are, all else as JSON; bytes that were not UTF-8 become U+FFFD."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if text.isascii() else text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
