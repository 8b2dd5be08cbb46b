"""Which rows go into a step: in order, within a bucket, and not into a mostly empty one."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from serving.batch import Bucket, Kind
from serving.config import EngineConfig
from serving.engine.buckets import BucketSet, derive
from serving.engine.packing import pack_extend, pack_score, pack_whole
from serving.engine.sequence import Sequence, make_sequences
from serving.engine.waiting import WaitingRows
from serving.types import Job, Prepared

BUCKETS = BucketSet(derive(EngineConfig(), 512))
STEP = 64


def rows_of(lengths: list[int]) -> list[Sequence]:
    return list(make_sequences(None, Job("j", "t", tuple(Prepared((1,) * n) for n in lengths))))


def waiting(rows: list[Sequence]) -> WaitingRows:
    queue = WaitingRows(1.0)
    for order, row in enumerate(rows):
        row.order = order
        queue.push(row)
    return queue


@pytest.mark.parametrize(
    ("count", "taken", "bucket_rows"),
    [
        (1, 1, 1),
        (4, 4, 4),
        (6, 4, 4),
        (15, 15, 16),
        (16, 16, 16),
        (20, 16, 16),
        (33, 16, 16),
        (60, 60, 64),
        (100, 64, 64),
    ],
)
def test_a_batch_that_would_be_mostly_empty_is_cut(count: int, taken: int, bucket_rows: int) -> None:
    queue = waiting(rows_of([31] * count))
    packing = pack_score(queue, BUCKETS, STEP)
    assert (len(packing.rows), packing.bucket) == (taken, Bucket(Kind.SCORE, bucket_rows, 32, 0))
    assert len(queue) == count - taken


def test_one_long_row_does_not_pad_the_others_to_its_length() -> None:
    packing = pack_score(waiting(rows_of([500, 31, 31, 31])), BUCKETS, STEP)
    assert packing.bucket == Bucket(Kind.SCORE, 1, 512, 0)


@given(st.lists(st.integers(1, 512), min_size=1, max_size=80))
def test_score_rows_go_out_in_order_and_none_is_lost(lengths: list[int]) -> None:
    rows = rows_of(lengths)
    queue, out = waiting(rows), []
    while len(queue):
        packing = pack_score(queue, BUCKETS, STEP)
        assert packing.bucket.rows >= len(packing.rows)
        assert packing.bucket.tokens >= max(packing.chunks)
        assert packing.chunks == tuple(row.num_prompt for row in packing.rows)
        out += packing.rows
    assert out == rows
    assert queue.num_tokens == 0


@pytest.mark.parametrize(
    ("lengths", "chunks", "bucket_rows"),
    [
        ([64], (64,), 1),
        ([256], (256,), 1),
        ([300], (256,), 1),
        ([64, 64], (64,), 1),
        ([64] * 7, (64,) * 7, 8),
        ([64] * 20, (64,) * 8, 8),
        ([500, *[60] * 7], (64, *(60,) * 7), 8),
    ],
)
def test_chunks(lengths: list[int], chunks: tuple[int, ...], bucket_rows: int) -> None:
    packing = pack_extend(rows_of(lengths), BUCKETS, max_chunk=256, page_size=16, step_tokens=STEP)
    assert (packing.chunks, packing.bucket.rows) == (chunks, bucket_rows)


@given(st.lists(st.tuples(st.integers(1, 512), st.floats(0, 1)), min_size=1, max_size=70))
def test_the_first_prompt_always_moves(prompts: list[tuple[int, float]]) -> None:
    rows = rows_of([n for n, _ in prompts])
    for row, (n, done) in zip(rows, prompts, strict=True):
        row.prefilled = int((n - 1) * done)
    packing = pack_extend(rows, BUCKETS, max_chunk=256, page_size=16, step_tokens=STEP)
    assert list(packing.rows) == rows[: len(packing.rows)]
    assert packing.bucket.rows >= len(packing.rows) > 0
    for row, chunk in zip(packing.rows, packing.chunks, strict=True):
        assert 0 < chunk <= min(packing.bucket.tokens, row.num_prompt - row.prefilled)
        assert (row.prefilled + chunk) <= packing.bucket.pages * 16


@pytest.mark.parametrize(
    ("lengths", "batch_s", "bucket", "taken"),
    [
        ([60], 1.0, (1, 64), 1),
        ([60] * 3, 1.0, (1, 64), 1),  # 0.3 s alone, 0.33 each of three
        ([60] * 4, 1.0, (8, 64), 4),
        ([60] * 8, 1.0, (8, 64), 8),
        ([60] * 8, 3.0, (1, 64), 1),
        ([20] * 8, 1.0, (1, 32), 1),  # 0.1 s
        ([20] * 8 + [60], 0.7, (8, 64), 8),
        ([20, 60], 1.0, (1, 32), 1),
    ],
)
def test_short_prompts_go_as_many_at_once_as_takes_least_for_each(
    lengths: list[int], batch_s: float, bucket: tuple[int, int], taken: int
) -> None:
    config = EngineConfig(prefill_chunk=256, prefill_batch_tokens=512)
    buckets = BucketSet(derive(config, 512))
    seconds = {(1, 32): 0.1, (1, 64): 0.3, (8, 64): batch_s}
    rows = rows_of(lengths)
    packing = pack_whole(rows, buckets, page_size=16, seconds=lambda p: seconds[p.bucket.rows, p.bucket.tokens])
    assert (packing.bucket.rows, packing.bucket.tokens) == bucket
    assert packing.rows == tuple(rows[:taken])
    assert packing.chunks == tuple(lengths[:taken])
