"""Prompts in chunks beside running streams, and many at once where they hold nobody up."""

import numpy as np
from msgspec.structs import replace

from serving.batch import Bucket, Kind, StepTimes
from serving.types import Priority
from tests.fakes_engine import SMALL, TurnedEngine, generate_row, prompt

GAPS = replace(SMALL, max_slots=32, max_context=256, token_gap_ratio=6.0, token_gap_ms=0.0, prefill_chunk=64)


def streams_and_then(num_late: int, length: int = 60, ms_per_step: float = 0.0) -> tuple[TurnedEngine, list[float]]:
    """16 streams, and prompts that come among them, on a device that takes 1 ms for each token of the bucket; the
    buckets hold 64 tokens or 4 x 64. Returns the streams' token gaps from then on, in seconds."""
    engine = TurnedEngine(GAPS, ms_per_token=1.0, ms_per_step=ms_per_step, num_pages=1025, max_context=256)
    streams = engine.submit(*[generate_row(prompt(3, i), 60) for i in range(16)])
    while len(engine.updates[streams[-1]]) < 4:
        engine.loop.turn()
    come_s = engine.clock()
    lates = engine.submit(*[generate_row(prompt(length, 90 + i), 1) for i in range(num_late)])
    engine.run()
    assert all(engine.ended(row) for row in lates)
    after = [[t for t in engine.times_s[row] if t >= come_s] for row in streams]
    return engine, [gap for times in after for gap in np.diff(times).tolist()]


def steps_of(engine: TurnedEngine) -> str:
    """In order: a digit for the rows of a prefill, d for a decode step."""
    kinds = [str(b.bucket.rows) if b.bucket.kind is Kind.EXTEND else "d" for b in engine.runner.batches]
    return "".join(kinds)


def test_short_prompts_beside_streams_go_whole() -> None:
    """One by one where that is as quick, so that a token takes 16 + 64 ms and not 16 + 256; each is paid by
    0.8 x (6 - 1) of a step's 16 ms."""
    engine, gaps = streams_and_then(3)
    assert max(gaps) <= 0.0161 + 0.064
    assert "d1d1d1d" in steps_of(engine)


def test_as_many_short_prompts_as_are_cheapest_go_at_once_and_owe_the_streams_their_time() -> None:
    """A step costs 16 ms beside its tokens: one prompt takes 80 ms, four take 4 x 68. Decode steps take 32 ms, and pay
    128 or, with more rows waiting for their turn, up to 4 times that."""
    engine, gaps = streams_and_then(24, ms_per_step=16.0)
    steps = steps_of(engine).strip("d")
    assert steps.endswith("4")
    assert max(gaps) <= 0.0321 + 0.272
    between = [len(part) for part in steps.split("4")[-6:-1]]
    assert len(between) == 5
    assert all(1 <= num <= 3 for num in between)  # 272 ms are paid by three steps at most
    assert sum(between) >= 6  # paid ahead was one batch only


def test_chunks_get_shorter_where_more_of_the_prompt_before_them_makes_them_slower() -> None:
    """At 1 ms a token 64 ms may be added to a step's 16; the warm-up said that a chunk takes 1 ms more for each token
    before it, whatever its length."""
    engine = TurnedEngine(GAPS, ms_per_token=1.0, num_pages=1025, max_context=256, chunks=(16, 32))
    pages = engine.runner.buckets[-1].pages
    for tokens in (16, 32, 64):
        bucket = Bucket(Kind.EXTEND, 1, tokens, pages)
        engine.costs.learn(bucket, StepTimes(tokens / 1000, tokens / 1000 + 0.1, 100))
    streams = engine.submit(*[generate_row(prompt(3, i), 60) for i in range(16)])
    while len(engine.updates[streams[-1]]) < 4:
        engine.loop.turn()
    (late,) = engine.submit(generate_row(prompt(200, 99), 1))
    come = len(engine.runner.batches)
    engine.run()
    assert engine.ended(late)
    chunks = [b.bucket.tokens for b in engine.runner.batches[come:] if b.bucket.kind is Kind.EXTEND]
    assert chunks[0] in (32, 64)
    assert chunks == sorted(chunks, reverse=True)
    assert chunks[-1] == 16


def test_an_urgent_prompt_does_not_wait_until_the_debt_is_paid() -> None:
    engine = TurnedEngine(GAPS, ms_per_token=1.0, num_pages=1025, max_context=256)
    engine.submit(*[generate_row(prompt(60, i), 60) for i in range(12)])
    while len(engine.runner.batches) < 8:
        engine.loop.turn()
    (late,) = engine.submit(generate_row(prompt(60, 99), 1), priority=Priority.URGENT)
    come = len(engine.runner.batches)
    engine.run()
    assert engine.ended(late)
    assert "1" in steps_of(engine)[come : come + 3]


def test_prompts_that_hold_nobody_up_go_as_many_as_fit() -> None:
    idle = TurnedEngine(GAPS, ms_per_token=1.0, num_pages=257)
    idle.submit(*[generate_row(prompt(60, 90 + i), 1) for i in range(8)])
    idle.run()
    assert max(b.bucket.rows for b in idle.runner.batches) == 4


def test_long_prompts_go_in_chunks() -> None:
    """Each needs more chunks than one: of five one goes at a time."""
    _, gaps = streams_and_then(5, length=100)
    assert max(gaps) <= 0.0161 + 0.064
