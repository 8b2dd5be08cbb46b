"""Scored rows into a file: CSV, JSONL or Parquet.

Each row is the input's columns and then `label`, the probabilities, `tier` and `error`. The file appears under its name
when it is complete, never before: it is written beside it and renamed.
"""

import csv
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec

from serving.errors import ServingError
from serving.types import Score

from .columns import Type, as_text, typed
from .record import Record

SUFFIXES = (".csv", ".jsonl", ".parquet")
ROWS_PER_GROUP = 8192
_JSONL_NAMES = ("label", "probabilities", "tier", "error")


class Sink(Protocol):
    def write(self, record: Record, score: Score) -> None: ...

    def close(self) -> None: ...


def result_columns(labels: Sequence[str]) -> tuple[str, ...]:
    """What is added to a table's columns."""
    return ("label", *(f"prob_{name}" for name in labels), "tier", "error")


def added_names(path: Path, labels: Sequence[str]) -> tuple[str, ...]:
    """What is added to a row in `path`'s format."""
    return _JSONL_NAMES if path.suffix.lower() == ".jsonl" else result_columns(labels)


@contextmanager
def open_sink(path: Path, columns: Mapping[str, Type], labels: Sequence[str]) -> Iterator[Sink]:
    """A sink for a file's suffix. The file is there when the block ends well, and untouched when it raises."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            sink = _SINKS[path.suffix.lower()](file, columns, labels)
            try:
                yield sink
            finally:
                sink.close()
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def check_output(path: Path) -> None:
    """ValueError or OSError where no sink could write `path`: before any work is done."""
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(
            f"{path}: cannot write {path.suffix or 'a file without a suffix'}; known: {', '.join(SUFFIXES)}"
        )
    if path.is_dir() or not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: {'it is a directory' if path.is_dir() else 'its directory does not exist'}")
    if path.suffix.lower() == ".parquet":
        _pyarrow()


class CsvSink:
    def __init__(self, file: BinaryIO, columns: Mapping[str, Type], labels: Sequence[str]) -> None:
        self._text = io.TextIOWrapper(file, encoding="utf-8", errors="surrogateescape", newline="")
        self._columns, self._labels = columns, labels
        self._rows = csv.writer(self._text, lineterminator="\n")
        self._rows.writerow([*columns, *result_columns(labels)])

    def write(self, record: Record, score: Score) -> None:
        kept = [_field(record.values.get(name)) for name in self._columns]
        added = _table_row(score, self._labels)
        self._rows.writerow([*kept, *("" if value is None else value for value in added)])

    def close(self) -> None:
        self._text.detach()  # flushes; the file stays the caller's


def _field(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else as_text(value)


class JsonlSink:
    def __init__(self, file: BinaryIO, columns: Mapping[str, Type], labels: Sequence[str]) -> None:
        self._file = file
        self._encoder = msgspec.json.Encoder()

    def write(self, record: Record, score: Score) -> None:
        failed = score.error is not None
        row = {
            **{name: _json(value) for name, value in record.values.items()},
            "label": score.label,
            "probabilities": None if failed else dict(score.probabilities),
            "tier": None if failed else score.tier.value,
            "error": None if score.error is None else _error_object(score.error),
        }
        self._file.write(self._encoder.encode(row) + b"\n")

    def close(self) -> None:
        """Everything is written already."""


def _json(value: Any) -> Any:
    return as_text(value) if isinstance(value, str) else value


class ParquetSink:
    """Columns of one type each; `prob_*` are doubles."""

    def __init__(self, file: BinaryIO, columns: Mapping[str, Type], labels: Sequence[str]) -> None:
        pa = _pyarrow()
        kinds = {Type.BOOL: pa.bool_(), Type.INT: pa.int64(), Type.FLOAT: pa.float64()}
        added = {name: pa.float64() if name.startswith("prob_") else pa.string() for name in result_columns(labels)}
        fields = {name: kinds.get(kind, pa.string()) for name, kind in columns.items()} | added
        self._columns, self._labels, self._names = columns, labels, tuple(added)
        self._schema = pa.schema(list(fields.items()))
        self._table = pa.Table
        self._writer = pa.parquet.ParquetWriter(file, self._schema)
        self._rows: list[dict[str, Any]] = []

    def write(self, record: Record, score: Score) -> None:
        added = dict(zip(self._names, _table_row(score, self._labels), strict=True))
        self._rows.append(typed(record.values, self._columns) | added)
        if len(self._rows) >= ROWS_PER_GROUP:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        self._writer.write_table(self._table.from_pylist(self._rows, schema=self._schema))
        self._rows.clear()


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError("Parquet needs pyarrow: pip install 'tidegate[parquet]', or write .csv or .jsonl") from None
    return pyarrow


def _table_row(score: Score, labels: Sequence[str]) -> list[Any]:
    """Values for result_columns."""
    if score.error is not None:
        return [None, *(None for _ in labels), None, _error_text(score.error)]
    return [score.label, *(score.probabilities.get(name) for name in labels), score.tier.value, None]


def _error_object(error: Exception) -> dict[str, str | None]:
    if not isinstance(error, ServingError):
        return {"code": "internal_error", "message": str(error), "param": None}
    return {"code": error.code, "message": error.message, "param": error.param}


def _error_text(error: Exception) -> str:
    return f"{_error_object(error)['code']}: {error}"


_SINKS: Mapping[str, type[CsvSink] | type[JsonlSink] | type[ParquetSink]] = {
    ".csv": CsvSink,
    ".jsonl": JsonlSink,
    ".parquet": ParquetSink,
}
