"""Prompts in chunks beside running streams, and many at once where they hold nobody up."""

import numpy as np
from msgspec.structs import replace

from serving.batch import Kind
from tests.fakes_engine import SMALL, TurnedEngine, generate_row, prompt

GAPS = replace(SMALL, max_slots=32, max_context=256, token_gap_ratio=6.0, token_gap_ms=0.0, prefill_chunk=64)


def streams_and_then(num_late: int, length: int = 60) -> tuple[TurnedEngine, list[float]]:
    """16 streams, and prompts that come among them, on a device that takes 1 ms for each token of the bucket; the
    buckets hold 64 tokens or 4 x 64. Returns the streams' token gaps from then on, in seconds."""
    engine = TurnedEngine(GAPS, ms_per_token=1.0, num_pages=1025, max_context=256)
    streams = engine.submit(*[generate_row(prompt(3, i), 60) for i in range(16)])
    while len(engine.updates[streams[-1]]) < 4:
        engine.loop.turn()
    come_s = engine.clock()
    lates = engine.submit(*[generate_row(prompt(length, 90 + i), 1) for i in range(num_late)])
    engine.run()
    assert all(engine.ended(row) for row in lates)
    after = [[t for t in engine.times_s[row] if t >= come_s] for row in streams]
    return engine, [gap for times in after for gap in np.diff(times).tolist()]


def test_prompts_beside_streams_go_in_chunks_that_keep_the_token_gap() -> None:
    """Of three prompts one goes at a time, so that a token takes 16 + 64 ms, not 16 + 256."""
    assert max(streams_and_then(3)[1]) <= 0.0161 + 0.064


def test_a_full_batch_of_short_prompts_goes_when_the_streams_had_as_much_for_themselves() -> None:
    engine, gaps = streams_and_then(12)
    sizes = [b.bucket.rows for b in engine.runner.batches if b.bucket.kind is Kind.EXTEND][-3:]
    assert sizes == [4, 4, 4]
    assert max(gaps) <= 0.0161 + 0.256
    late = [b.bucket.kind for b in engine.runner.batches if b.bucket.rows >= 4]
    between = "".join("E" if kind is Kind.EXTEND else "d" for kind in late).strip("d").split("E")[-3:-1]
    # 0.8 x (6 - 1) steps of 16 ms or more save one batch: three or four steps, as more rows make them longer
    assert all(3 <= len(steps) <= 4 for steps in between)


def test_prompts_that_hold_nobody_up_go_as_many_as_fit() -> None:
    idle = TurnedEngine(GAPS, ms_per_token=1.0, num_pages=257)
    idle.submit(*[generate_row(prompt(60, 90 + i), 1) for i in range(8)])
    idle.run()
    assert max(b.bucket.rows for b in idle.runner.batches) == 4


def test_long_prompts_are_no_batch() -> None:
    """Each needs more chunks than one: they go as one alone does."""
    _, gaps = streams_and_then(5, length=100)
    assert max(gaps) <= 0.0161 + 0.064
