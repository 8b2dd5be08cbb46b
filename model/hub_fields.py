"""Typed, bounded reading of a hub config.json: a field is what it should be, or one line says what it is instead.

A config comes from strangers: without bounds, a layer count of 10**9 would fill the memory before any tensor is seen.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any


class UnsupportedModel(ValueError):
    """The config.json describes something that is not implemented, or is not a config at all."""


class HubFields(Mapping[str, Any]):
    """A JSON object whose fields are asked for by kind; null counts as absent. Every method raises UnsupportedModel."""

    def __init__(self, fields: Mapping[str, Any], where: str = "config.json") -> None:
        self._fields, self._where = fields, where

    def __getitem__(self, name: str) -> Any:
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def count(self, name: str, default: int | None = None, *, least: int = 1, most: int) -> int:
        """A whole number from `least` to `most`."""
        value = self._required(name, default)
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int or not least <= value <= most:
            raise self._wrong(name, value, f"a whole number from {least} to {most}")
        return value

    def number(self, name: str, default: float | None = None, *, positive: bool = True) -> float:
        """A finite number, above 0 if `positive`, else at least 0."""
        value = self._required(name, default)
        if type(value) not in (int, float):
            raise self._wrong(name, value, "a number")
        if not (abs(value) < 1e30 and math.isfinite(value) and (value > 0 if positive else value >= 0)):
            raise self._wrong(name, value, f"a finite number {'above' if positive else 'of at least'} 0")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._required(name, default)
        if type(value) is not bool:
            raise self._wrong(name, value, "true or false")
        return value

    def group(self, name: str) -> "HubFields | None":
        """An object within the object; None where it is absent, null or empty."""
        value = self._fields.get(name)
        if not value and type(value) in (dict, type(None)):
            return None
        if not isinstance(value, Mapping):
            raise self._wrong(name, value, "an object or null")
        return HubFields(value, f"{self._where}: {name}")

    def ids(self, name: str) -> tuple[int, ...]:
        """Token ids: one, a list of them, or none."""
        value = self._fields.get(name)
        many = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(v) is int and 0 <= v < 1 << 31 for v in many):
            raise self._wrong(name, value, "a token id, a list of them, or null")
        return tuple(many)

    def _required(self, name: str, default: Any) -> Any:
        value = self._fields.get(name)
        value = default if value is None else value
        if value is None:
            raise UnsupportedModel(f"{self._where} lacks the field {name!r}")
        return value

    def _wrong(self, name: str, value: Any, allowed: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self._where}: {name} is {shown(value)}; it must be {allowed}")


def shown(value: Any, limit: int = 60) -> str:
    """A stranger's value in a message: escaped and cut. Numbers too long to print are named so."""
    try:
        text = ascii(value)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__} too long to show"
    return text if len(text) <= limit else text[:limit] + "..."
