"""A task in one TOML file: the columns of a row, the text that is made of them, the labels and the threshold.

HTTP, offline scoring, fine-tuning and evaluation read the same file, so that names on the wire, label tokens, data
values and the positive class are defined once. Everything in it is data: derived words are trees of a few named
operations, never code. A row's text depends on the numbers only: `12`, `12.0` and `"12"` give the same one.

    name = "credit-mini"
    text = " {lim} {pay} =>"            # {word or column}
    threshold = 0.5                     # of the positive label, chosen on validation rows
    [columns]                           # what a row must have; further columns are ignored
    limit_bal = "number"
    [words.lim]                         # a number as one of a few words (see words.py): lim=0, lim=1, lim=2
    value = "limit_bal"
    edges = [50000, 100000]
    [labels]
    good = {text = " good", value = 0}
    bad = {text = " bad", value = 1, positive = true}
    [example]                           # a row to show people; optional
    limit_bal = 80000
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from .words import Word

_FIELD = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)

Kind = Literal["number", "text"]


class TemplateError(ValueError):
    """A row, or a template file, that cannot be used. `column` names the column at fault, if it is one's fault."""

    def __init__(self, message: str, column: str | None = None) -> None:
        super().__init__(message)
        self.column = column


@dataclass(frozen=True, slots=True)
class Label:
    """name: on the wire; text: what the model reads; value: in the data; positive: what the threshold is about."""

    name: str
    text: str
    value: int | float | str
    positive: bool = False


class _LabelEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    text: str
    value: int | float | str
    positive: bool = False


class _WordEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    value: str | dict[str, Any]
    edges: list[float]


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    text: str
    columns: dict[str, Kind]
    labels: dict[str, _LabelEntry]
    words: dict[str, _WordEntry] = {}
    threshold: float = 0.5
    label_column: str = "label"
    example: dict[str, int | float | str] = {}


class Template:
    """A parsed template. Immutable, safe to use from several threads."""

    def __init__(self, file: _File) -> None:
        """Raises TemplateError where the parts of the file do not fit together."""
        self.name = file.name
        self.columns: tuple[str, ...] = tuple(file.columns)
        self.label_column = file.label_column
        self.labels = tuple(Label(name, v.text, v.value, v.positive) for name, v in file.labels.items())
        self.threshold = file.threshold
        self._positive = next((x.name for x in self.labels if x.positive), None)
        self._others = tuple(x.name for x in self.labels if x.name != self._positive)
        self._kinds = file.columns
        numeric = frozenset(c for c, kind in file.columns.items() if kind == "number")
        self.words = tuple(_word(name, entry, numeric) for name, entry in file.words.items())
        parts = _FIELD.split(file.text)  # literal, field, literal, field, ..., literal
        self.literals: tuple[str, ...] = tuple(parts[::2])
        self._fields: tuple[str, ...] = tuple(parts[1::2])
        self._form = "%s".join(literal.replace("%", "%%") for literal in self.literals)
        _check_labels(self.labels, self.threshold)
        _check_fields(self._fields, file)
        self.example: Mapping[str, int | float | str] = file.example
        self._check_example()

    @classmethod
    def load(cls, path: str | Path) -> "Template":
        """Read a TOML file. Raises TemplateError, which says what in it is wrong."""
        try:
            return cls(msgspec.toml.decode(Path(path).read_bytes(), type=_File))
        except (msgspec.MsgspecError, OSError, UnicodeDecodeError) as error:
            raise TemplateError(f"{path}: {error}") from error
        except TemplateError as error:
            raise TemplateError(f"{path}: {error}", error.column) from error

    def render(self, features: Mapping[str, object]) -> str:
        """The text of a row. Raises TemplateError, which names the column that is missing or unusable."""
        numbers: dict[str, float] = {}
        shown: dict[str, str] = {}
        for column, kind in self._kinds.items():
            raw = features.get(column)
            if kind == "number":
                numbers[column] = _number(raw, column)
            else:
                shown[column] = _text(raw, column)
        for word in self.words:
            try:
                shown[word.name] = word.render(numbers)
            except ValueError as error:
                raise TemplateError(str(error)) from error
        fields = (shown[f] if f in shown else _plain(numbers[f]) for f in self._fields)
        return self._form % tuple(fields)

    def _check_example(self) -> None:
        try:
            if self.example:
                self.render(self.example)
        except TemplateError as error:
            raise TemplateError(f"example: {error}", error.column) from error

    def decide(self, probabilities: Mapping[str, float]) -> str:
        """The label to return: the positive one from the threshold on, else the likeliest of the others."""
        if self._positive is not None and probabilities[self._positive] >= self.threshold:
            return self._positive
        return max(self._others, key=probabilities.__getitem__)

    def label_of(self, value: object) -> Label:
        """The label that a data value stands for: 1, 1.0, "1" alike. Raises TemplateError."""
        wanted = _canonical(value)
        for label in self.labels:
            if _canonical(label.value) == wanted:
                return label
        allowed = ", ".join(str(x.value) for x in self.labels)
        raise TemplateError(f"{self.label_column}: got {value!r}, allowed are {allowed}", self.label_column)


def _number(value: Any, column: str) -> float:
    """Of float's many spellings only plain decimals; a bool is no number. One function: a row has two dozen."""
    kind = type(value)
    if not (kind is float or kind is int or (isinstance(value, str) and _NUMBER.fullmatch(value.strip()))):
        raise _unusable(value, column, "a number")
    try:
        number = float(value)
    except (OverflowError, ValueError):  # an int of more digits than a float holds, or than Python reads
        number = math.inf
    if not math.isfinite(number):
        raise TemplateError(f"column {column!r} is not finite", column)
    return number


def _text(value: object, column: str) -> str:
    if isinstance(value, str) and value.strip():
        return value.strip()
    if type(value) is float or type(value) is int:
        return _plain(_number(value, column))
    raise _unusable(value, column, "text")


def _unusable(value: object, column: str, wanted: str) -> TemplateError:
    if value is None or (isinstance(value, str) and not value.strip()):
        return TemplateError(f"column {column!r} is missing", column)
    if isinstance(value, str):
        return TemplateError(f"column {column!r} must be {wanted}, got {value[:40]!r}", column)
    return TemplateError(f"column {column!r} must be {wanted}, got {type(value).__name__}", column)


def _plain(number: float) -> str:
    return str(int(number)) if number.is_integer() and abs(number) < 1e15 else repr(number)


def _canonical(value: object) -> str:
    text = value.strip() if isinstance(value, str) else str(value)
    return _plain(float(text)) if _NUMBER.fullmatch(text) else text


def _word(name: str, entry: _WordEntry, numeric: frozenset[str]) -> Word:
    try:
        return Word(name, entry.value, entry.edges, numeric)
    except ValueError as error:
        raise TemplateError(f"words.{name}.{error}") from error


def _check_labels(labels: Sequence[Label], threshold: float) -> None:
    if len(labels) < 2:
        raise TemplateError("labels: at least two are needed")
    if sum(x.positive for x in labels) > 1:
        raise TemplateError("labels: only one may be positive")
    for what in ("text", "value"):
        if len({str(getattr(x, what)) for x in labels}) < len(labels):
            raise TemplateError(f"labels: two have the same {what}")
    if any(not x.text for x in labels):
        raise TemplateError("labels: a text is empty")
    if not 0.0 <= threshold <= 1.0:
        raise TemplateError(f"threshold: got {threshold}, allowed are 0 to 1")


def _check_fields(fields: Sequence[str], file: _File) -> None:
    both = sorted(set(file.columns) & set(file.words))
    if both:
        raise TemplateError(f"words.{both[0]}: a column has the same name")
    for name in fields:
        if name not in file.columns and name not in file.words:
            raise TemplateError(f"text: {{{name}}} is neither a column nor a word")
