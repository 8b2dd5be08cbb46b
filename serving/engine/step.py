"""One device step: the rows in it, and the Batch that the runner gets.

One constructor a kind. Rows that are absent and fields that a kind does not use are neutral values of the
bucket's shape (see serving.batch), so every batch of a bucket runs the same compiled program.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.batch import NUM_TARGETS, Batch, Bucket, Kind, SlotMask, SlotTable

from .sequence import Sequence
from .slots import Slots

_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_BY_SLOT = ("temperature", "top_k", "top_p", "min_p", "seed", "table", *_PENALTIES)


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    batch: Batch
    rows: tuple[Sequence, ...]  # row r of the batch is rows[r]
    starts: tuple[int, ...]  # position of each row's first token; at most, where steps on their way have drafts
    chunks: tuple[int, ...]  # valid tokens of each row
    runs: tuple[int, ...]  # `run` of each row when the step was formed

    @property
    def num_tokens(self) -> int:
        return sum(self.chunks)

    @property
    def kind(self) -> Kind:
        return self.batch.bucket.kind

    @property
    def touches_kv(self) -> bool:
        """Whether the KV cache is lost if this step fails."""
        return self.kind is not Kind.SCORE


def score_step(bucket: Bucket, rows: tuple[Sequence, ...]) -> Step:
    """Whole prompts, without KV."""
    fields = _neutral(bucket)
    lengths = tuple([row.num_prompt for row in rows])
    fields["length"][: len(rows)] = lengths
    inside = np.arange(bucket.tokens) < fields["length"][:, None]
    fields["tokens"][inside] = np.concatenate([row.prompt for row in rows])  # row by row, as they stand in `inside`
    _put_targets(fields, rows)
    batch = _batch(bucket, fields, _wants_prompt(rows), False)
    return _step(batch, rows, (0,) * len(rows), lengths)


def extend_step(bucket: Bucket, rows: tuple[Sequence, ...], chunks: tuple[int, ...], slots: Slots) -> Step:
    """The next `chunks[r]` tokens of each prompt, from `prefilled` on."""
    fields = _neutral(bucket)
    for r, (row, chunk) in enumerate(zip(rows, chunks, strict=True)):
        _put_prompt(fields, r, row, row.prefilled, chunk)
    _put_targets(fields, rows)
    want_top = _put_slots(fields, bucket, rows, slots)
    last = [row.prefilled + chunk == row.num_prompt for row, chunk in zip(rows, chunks, strict=True)]
    fields["table"][: len(rows)] *= last  # what a chunk before the last one samples is nobody's token
    sampling = [row for row, table in zip(rows, fields["table"].tolist(), strict=False) if table]
    batch = _batch(bucket, fields, _wants_prompt(rows), want_top, sampling, new=True)
    return _step(batch, rows, tuple(row.prefilled for row in rows), chunks)


def decode_step(bucket: Bucket, rows: tuple[Sequence, ...], slots: Slots) -> Step:
    """One token a row: the one that the device keeps in the row's slot."""
    fields = _neutral(bucket)
    want_top = _put_slots(fields, bucket, rows, slots)
    fields["start"] = slots.position[fields["slot"]]
    fields["length"][: len(rows)] = 1
    batch = _batch(bucket, fields, False, want_top, rows)
    return _step(batch, rows, tuple(fields["start"][: len(rows)].tolist()), (1,) * len(rows))


def speculate_step(bucket: Bucket, rows: tuple[Sequence, ...], chunks: tuple[int, ...], slots: Slots) -> Step:
    """The last token of each row, as in a decode step, and the device's draft of the next one where its chunk is 2."""
    fields = _neutral(bucket)
    want_top = _put_slots(fields, bucket, rows, slots)
    fields["start"] = slots.position[fields["slot"]]
    fields["length"][: len(rows)] = chunks
    batch = _batch(bucket, fields, False, want_top, rows)
    return _step(batch, rows, tuple(fields["start"][: len(rows)].tolist()), chunks)


def _step(batch: Batch, rows: tuple[Sequence, ...], starts: tuple[int, ...], chunks: tuple[int, ...]) -> Step:
    return Step(batch, rows, starts, chunks, tuple([row.run for row in rows]))


def padding(bucket: Bucket) -> Batch:
    """A batch of nobody's rows."""
    return _batch(bucket, _neutral(bucket), False, False)


def _neutral(b: Bucket) -> dict[str, NDArray[Any]]:
    return {
        "tokens": np.zeros((b.rows, b.tokens), np.int32),
        "start": np.zeros(b.rows, np.int32),
        "length": np.zeros(b.rows, np.int32),
        "next_token": np.zeros(b.rows, np.int32),
        "page_table": np.zeros((b.rows, b.pages), np.int32),
        "slot": np.zeros(b.rows, np.int32),
        "targets": np.zeros((b.rows, NUM_TARGETS), np.int32),
        "temperature": np.zeros(b.rows, np.float32),
        "top_k": np.zeros(b.rows, np.int32),
        "top_p": np.ones(b.rows, np.float32),
        "min_p": np.zeros(b.rows, np.float32),
        "seed": np.zeros((b.rows, 2), np.uint32),
        "table": np.zeros(b.rows, np.int32),
        "repetition_penalty": np.ones(b.rows, np.float32),
        "presence_penalty": np.zeros(b.rows, np.float32),
        "frequency_penalty": np.zeros(b.rows, np.float32),
    }


def _table(row: Sequence) -> SlotTable:
    """Before the row samples in its slot for the first time; what was generated before is the end of its prompt."""
    assert row.sampling is not None
    prompt, generated = row.prompt[: row.num_asked], row.prompt[row.num_asked :]
    return SlotTable(row.slot, prompt, generated, row.sampling.logit_bias, row.sampling.allowed_token_ids)


def _put_prompt(fields: dict[str, NDArray[Any]], r: int, row: Sequence, start: int, length: int) -> None:
    stop = start + length
    fields["tokens"][r, :length] = row.prompt[start:stop]
    fields["start"][r], fields["length"][r] = start, length
    if stop < row.num_prompt:
        fields["next_token"][r] = row.prompt[stop]


def _put_targets(fields: dict[str, NDArray[Any]], rows: tuple[Sequence, ...]) -> None:
    """Rows of a job mostly have the same ones: one write for neighbours that do."""
    start = 0
    for targets, same in groupby(rows, attrgetter("targets")):
        stop = start + len(tuple(same))
        fields["targets"][start:stop, : len(targets)] = targets
        start = stop


def _put_slots(fields: dict[str, NDArray[Any]], bucket: Bucket, rows: tuple[Sequence, ...], slots: Slots) -> bool:
    """Everything that is kept by slot; whether any row wants the most likely tokens."""
    index = np.zeros(bucket.rows, np.int32)
    index[: len(rows)] = [row.slot for row in rows]
    fields["slot"] = index
    fields["page_table"] = slots.page_table[index, : bucket.pages]
    for name in _BY_SLOT:
        fields[name] = getattr(slots, name)[index]
    return bool(slots.want_top[index].any())


def _wants_prompt(rows: tuple[Sequence, ...]) -> bool:
    return any(row.wants_prompt for row in rows)


def _batch(
    bucket: Bucket,
    fields: dict[str, NDArray[Any]],
    want_prompt: bool,
    want_top: bool,
    sampling: Iterable[Sequence] = (),
    *,
    new: bool = False,
) -> Batch:
    """`sampling`: rows that may have tables and masks to set; `new`: for the first time in their slots."""
    return Batch(
        bucket=bucket,
        want_top=np.array(want_top),
        want_prompt=np.array(want_prompt),
        set_tables=tuple(_table(row) for row in sampling) if new else (),
        set_masks=tuple(SlotMask(row.slot, row.mask) for row in sampling if row.mask is not None),
        **fields,
    )
