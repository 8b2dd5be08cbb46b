"""`score_file`: a file in, the same rows with labels and probabilities out.

Rows take the stages that a request takes (serving.pipeline.scoring) and the same engine, without limiter and breaker.
Order is the input's; a row that cannot be scored carries its own error; memory is that of a few chunks.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TextIO

from tqdm import tqdm

from serving.engine.engine import Engine
from serving.errors import ServingError
from serving.pipeline.labels import LabelText, resolve_labels
from serving.pipeline.language import Language
from serving.pipeline.prompts import find_template
from serving.pipeline.scoring import ScorePlan, prepare_scores
from serving.types import Input, Score

from .columns import Type, find_columns
from .record import Record, to_input
from .sink import Sink, added_names, check_output, open_sink
from .source import CsvSource, Source, count_lines, open_source
from .window import Window

ROWS_PER_JOB = 64
JOBS_IN_FLIGHT = 4
_POLL_S = 0.2  # how often the bar moves while programs compile


def score_file(
    source: Path,
    out: Path,
    *,
    language: Language,
    engine: Engine,
    labels: Sequence[str] | None = None,
    template: str | None = None,
    messages: TextIO = sys.stderr,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Score every row of `source` (.csv, .jsonl) into `out` (.csv, .jsonl, .parquet); the process's exit code.

    `engine` is not started yet; it is closed at the end. `labels`: instead of the template's. 0 also where some rows
    have errors, which are counted on `messages`; 1 where all of them have. Raises ValueError or OSError.
    """
    check_output(out)
    rows = open_source(source)
    if out.exists() and out.samefile(source):
        raise ValueError(f"{out} is the input; write to another file")
    asked = None if labels is None else [LabelText(name) for name in labels]

    def prepare(inputs: Sequence[Input | ServingError]) -> ScorePlan:
        return prepare_scores(language, inputs, labels=asked, template=template)

    try:
        names = _label_names(language, asked, template)
        columns = _columns(rows, out, names)
        _warm_up(engine, messages)
        started_s = clock()
        window: Window[Record] = Window(engine, prepare, num_chunks=JOBS_IN_FLIGHT)
        with open_sink(out, columns, names) as sink, _bar(count_lines(source), "row", messages) as bar:
            num_rows, num_errors = _write(_scores(rows, window, language, template), sink, bar)
        _say(messages, out, num_rows, num_errors, clock() - started_s)
    except ServingError as error:
        raise ValueError(error.message) from error
    finally:
        engine.close()
    return 1 if num_rows and num_errors == num_rows else 0


def _label_names(language: Language, asked: Sequence[LabelText] | None, template: str | None) -> tuple[str, ...]:
    """The labels that every row gets. BadRequest where there are none."""
    bare = template is None and language.default_template is None
    return resolve_labels(language, None if bare else find_template(language, template), asked).names


def _columns(rows: Source, out: Path, labels: Sequence[str]) -> Mapping[str, Type]:
    """The input's columns. ValueError where the output adds one of them: before any work is done."""
    if isinstance(rows, CsvSource) and out.suffix.lower() != ".parquet":
        columns = dict.fromkeys(rows.columns, Type.TEXT)
    else:
        columns = find_columns(rows)
    clash = [name for name in added_names(out, labels) if name in columns]
    if clash:
        raise ValueError(f"the input has columns that the output adds: {', '.join(clash)}; rename or remove them")
    return columns


def _warm_up(engine: Engine, messages: TextIO) -> None:
    engine.start()
    with _bar(engine.progress[1], "program", messages) as bar:
        while not engine.wait_ready(_POLL_S):
            bar.update(engine.progress[0] - bar.n)
        bar.update(engine.progress[0] - bar.n)
    if engine.failure is not None:
        raise ValueError(f"the model could not be made ready: {engine.failure}") from engine.failure


def _scores(
    rows: Source, window: Window[Record], language: Language, template: str | None
) -> Iterator[tuple[Record, Score]]:
    records = rows.records()
    try:
        while chunk := tuple(islice(records, ROWS_PER_JOB)):
            yield from window.put(chunk, [to_input(record, language, template) for record in chunk])
        yield from window.drain()
    finally:
        window.cancel()


def _write(scored: Iterator[tuple[Record, Score]], sink: Sink, bar: "tqdm[None]") -> tuple[int, int]:
    """(rows, rows with an error)"""
    num_rows = num_errors = 0
    for record, score in scored:
        sink.write(record, score)
        num_rows += 1
        num_errors += score.error is not None
        bar.update()
    return num_rows, num_errors


def _bar(total: int, unit: str, messages: TextIO) -> "tqdm[None]":
    """On a terminal only."""
    return tqdm(total=total, unit=unit, file=messages, disable=None, dynamic_ncols=True)


def _say(messages: TextIO, out: Path, num_rows: int, num_errors: int, seconds: float) -> None:
    pace = num_rows / max(seconds, 1e-9)
    messages.write(f"{out}: {num_rows} rows, {num_errors} of them with an error, {pace:.0f} rows/s\n")
    messages.flush()
