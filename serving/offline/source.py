"""Rows out of a CSV or JSONL file, one at a time, whatever is in it.

A line that cannot be read becomes a Record with an error: one bad row never ends the file. Blank lines are skipped.
"""

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

import msgspec

from serving.errors import BadRequest

from .record import Record

SUFFIXES = (".csv", ".jsonl")
_BLOCK = 1 << 20


class Source(Protocol):
    """A file that may be read more than once."""

    def records(self) -> Iterator[Record]: ...


def open_source(path: Path) -> Source:
    """The reader for a file's suffix. Raises ValueError or OSError with a message for people."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file")
    if path.suffix.lower() == ".csv":
        return CsvSource(path)
    if path.suffix.lower() == ".jsonl":
        return JsonlSource(path)
    raise ValueError(f"{path}: cannot read {path.suffix or 'a file without a suffix'}; known: {', '.join(SUFFIXES)}")


def count_lines(path: Path) -> int:
    """About as many as there are rows: for a progress bar."""
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(_BLOCK), b""))


class CsvSource:
    """The first line names the columns. Bytes that are not UTF-8 are an error of their row."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with self._open() as file:
                self.columns = tuple(next(csv.reader(file), ()))
        except csv.Error as error:
            raise ValueError(f"{path}: the first line is not CSV: {error}") from error
        if not self.columns:
            raise ValueError(f"{path}: the first line is empty; it names the columns of a CSV file")
        if _has_surrogate("".join(self.columns)):
            raise ValueError(f"{path}: the names of the columns are not UTF-8")
        repeated = sorted({name for name in self.columns if self.columns.count(name) > 1})
        if repeated:
            raise ValueError(f"{path}: a column is there twice: {', '.join(map(repr, repeated))}")

    def records(self) -> Iterator[Record]:
        with self._open() as file:
            rows = csv.reader(file)
            next(rows)
            number = 0
            while True:
                try:
                    row = next(rows)
                except StopIteration:
                    return
                except csv.Error as error:
                    number += 1
                    yield Record(number, error=BadRequest(f"row {number} is not CSV: {error}"))
                    continue
                if row:
                    number += 1
                    yield self._record(number, row)

    def _record(self, number: int, row: Sequence[str]) -> Record:
        values = dict(zip(self.columns, row, strict=False))
        error = None
        if len(row) != len(self.columns):
            error = BadRequest(f"row {number} has {len(row)} fields, the header {len(self.columns)}")
        elif _has_surrogate("".join(row)):
            error = BadRequest(f"row {number} is not UTF-8")
        return Record(number, values, error)

    def _open(self) -> TextIO:
        return self._path.open(encoding="utf-8-sig", errors="surrogateescape", newline="")


def _has_surrogate(text: str) -> bool:
    return not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text)


class JsonlSource:
    """One JSON object a line."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def records(self) -> Iterator[Record]:
        decoder = msgspec.json.Decoder(dict[str, Any])
        number = 0
        with self._path.open("rb") as file:
            for line in file:
                line = line.removeprefix(b"\xef\xbb\xbf") if number == 0 else line
                if not line.strip():
                    continue
                number += 1
                try:
                    yield Record(number, decoder.decode(line))
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                    yield Record(number, error=BadRequest(f"row {number} is not a JSON object: {error}"))
