"""Typed reading of one architecture's keys in a GGUF; faults are collected, and keys that nobody asked for are told."""

import fnmatch
import math
from collections.abc import Mapping
from typing import Any

from .hub_fields import shown

# Keys that change nothing here: what the file was made for, or what its tensors say again.
HARMLESS = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned")
# Keys of what these models do not have: allowed while they say so.
ABSENT: Mapping[str, Any] = {"expert_count": 0, "expert_used_count": 0, "attention.causal": True,
                             "attention.sliding_window": 0}  # fmt: skip


class GgufFields:
    """The keys `ARCH.*`, asked for without the prefix. A value that is missing or wrong is a line in `problems`."""

    def __init__(self, metadata: Mapping[str, Any], arch: str) -> None:
        self._prefix = arch + "."
        self._fields = {k.removeprefix(self._prefix): v for k, v in metadata.items() if k.startswith(self._prefix)}
        self._asked: set[str] = set()
        self.problems: list[str] = []

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number; one value a layer is as good where all are the same."""
        value = self._value(name, default)
        if type(value) is int and value >= 0:
            return value
        return self._wrong(name, value, "a whole number, the same in every layer", default or 1)

    def number(self, name: str, default: float | None = None) -> float:
        value = self._value(name, default)
        if type(value) in (int, float) and math.isfinite(value):
            return float(value)
        return self._wrong(name, value, "a finite number", default or 1.0)

    def text(self, name: str, default: str) -> str:
        value = self._value(name, default)
        return value if isinstance(value, str) else self._wrong(name, value, "a string", default)

    def refuse(self, name: str, why: str) -> None:
        self.problems.append(f"key: {self._prefix}{name} is {shown(self._fields.get(name))}: {why}")

    def rest(self, ignore: tuple[str, ...]) -> list[str]:
        """A line for each key that was not asked for and may change what the model computes."""
        left = sorted(self._fields.keys() - self._asked - set(HARMLESS))
        return [
            f"key: {self._prefix}{name} is {shown(self._fields[name])}, which is not understood (--ignore to go on)"
            for name in left
            if not (name in ABSENT and self._fields[name] == ABSENT[name])
            and not any(fnmatch.fnmatchcase(self._prefix + name, pattern) for pattern in ignore)
        ]

    def _value(self, name: str, default: Any) -> Any:
        self._asked.add(name)
        value = self._fields.get(name, default)
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            return value[0]
        return value

    def _wrong(self, name: str, value: Any, allowed: str, instead: Any) -> Any:
        found = "missing" if name not in self._fields else f"{shown(value)}; it must be {allowed}"
        self.problems.append(f"key: {self._prefix}{name} is {found}")
        return instead
