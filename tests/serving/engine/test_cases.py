"""Faults that other serving engines had, replayed against the engine's core (numbered as in the case list)."""

import queue

import pytest
from msgspec.structs import replace

from serving.batch import NUM_TOP, Kind
from serving.config import EngineConfig
from serving.engine.engine import Engine
from serving.engine.sequence import Sequence
from serving.errors import StepFailed
from serving.types import Job, Prepared, Priority, SamplingParams
from tests.fakes import FakeRunner, ToyModel
from tests.fakes_engine import SMALL, TurnedEngine, generate_row, prompt


def test_a17_jobs_of_one_id_are_told_apart_and_a_late_cancel_hits_nobody() -> None:
    """A client's id is a label: the engine's handle is the ticket."""
    engine = Engine(FakeRunner(max_slots=4), EngineConfig(max_slots=4, max_context=512), max_context=512)
    engine.start()
    assert engine.wait_ready(20.0)
    expected = ToyModel().generate((5, 6, 7), 2)
    for _ in range(1000):
        answers = [Answer() for _ in range(3)]
        first, second = (engine.submit(same_job(), answer) for answer in answers[:2])
        first.cancel()
        third = engine.submit(same_job(), answers[2])
        first.cancel()
        for answer in answers[1:]:
            assert answer.tokens() == expected
        second.cancel()
        third.cancel()  # of a job that has ended: changes nothing
        answers[0].tokens()
    stats = engine.stats
    assert 0 <= stats.cancelled_rows <= 1000
    assert stats.finished_rows + stats.cancelled_rows == 3000
    engine.close()


def same_job() -> Job:
    return Job("same", "t", (generate_row((5, 6, 7), 2),))


class Answer:
    """The tokens of a one-row job, waited for."""

    def __init__(self) -> None:
        self._news: queue.Queue[tuple[object, ...]] = queue.Queue()

    def __call__(self, updates: tuple[object, ...]) -> None:
        self._news.put(updates)

    def tokens(self) -> list[int]:
        tokens: list[int] = []
        while True:
            for update in self._news.get(timeout=20.0):
                tokens += [t.token_id for t in update.tokens]  # type: ignore[attr-defined]
                if update.finish is not None or update.error is not None:  # type: ignore[attr-defined]
                    return tokens


SIXTEEN = EngineConfig(max_slots=16, page_size=16, max_context=4096, prefill_chunk=64)


def test_a18_an_urgent_row_starts_in_time_when_low_ones_hold_every_slot() -> None:
    """16 slots of 4,000 tokens to come at 5 ms a row and step; one urgent row: its first token within 500 ms."""
    engine = TurnedEngine(SIXTEEN, ms_per_token=5.0, num_pages=4097, max_context=4096)
    lows = engine.submit(*[generate_row(prompt(8, i), 4000) for i in range(16)], priority=Priority.LOW)
    while not all(engine.updates[row] for row in lows):
        engine.loop.turn()
    asked_s = engine.clock()
    (urgent,) = engine.submit(generate_row(prompt(8, 99), 8), priority=Priority.URGENT)
    while not engine.ended(urgent):
        engine.loop.turn()
    assert engine.times_s[urgent][0] - asked_s < 0.5
    (stopped,) = [row for row in lows if row.run]
    while stopped.slot == 0:  # it keeps its place: the slot that the urgent row leaves is its own
        engine.loop.turn()
    for row in lows:
        engine.cancel(row)


def test_a18_a_low_row_ends_under_endless_urgent_ones() -> None:
    """Urgent rows at 1.2 x what the slots take for 60 s; one low row in between ends within the ageing bound: the two
    classes' ageing, and the urgent ones that were there before."""
    config = replace(SIXTEEN, max_slots=4, ageing_s=2.0)
    engine = TurnedEngine(config, ms_per_token=2.0, max_context=256, num_pages=129)
    engine.clock.advance(0.0)
    low: Sequence | None = None
    sent, number = 0.0, 0
    per_row_s = 0.128 + 8 * 0.008 / 4  # a chunk alone, and its share of eight decode steps
    while engine.clock() < 60.0 and not (low and engine.ended(low)):
        while sent <= engine.clock():
            engine.submit(generate_row(prompt(20, number), 8), priority=Priority.URGENT)
            number, sent = number + 1, sent + per_row_s / 1.2
        if low is None and engine.clock() > 5.0:
            (low,) = engine.submit(generate_row(prompt(20, 10_000), 8), priority=Priority.LOW)
        engine.loop.turn()
    assert low is not None
    assert engine.ended(low)
    assert engine.tokens(low) == engine.model.generate(prompt(20, 10_000), 8)
    backlog_s = 5.0 * 0.5  # what 5 s of too many urgent rows can have left, generously
    assert engine.times_s[low][-1] - low.arrived_s < 2 * config.ageing_s + backlog_s


def test_a21_a_burst_of_the_longest_requests_costs_no_more_memory_than_planned() -> None:
    """72 rows of the longest kind at once, half with all prompt log-probabilities, and a device that is out of memory
    in one step: the rows of this step fail, all others are answered, pages never exceed the pool."""
    engine = TurnedEngine(num_pages=33, fail_result=[7])
    length = SMALL.max_context - 4
    rows = engine.submit(
        *[
            Prepared(
                prompt(length, i),
                SamplingParams(max_tokens=4, temperature=0.0),
                prompt_logprobs=NUM_TOP if i % 2 else -1,
            )
            for i in range(72)
        ]
    )
    engine.run()
    failed = [row for row in rows if engine.last(row).error is not None]
    assert 0 < len(failed) <= SMALL.max_slots
    assert all(isinstance(engine.last(row).error, StepFailed) for row in failed)
    assert StepFailed.status == 503
    for i, row in enumerate(rows):
        if row not in failed:
            assert engine.tokens(row) == engine.model.generate(prompt(length, i), 4)
            first = next(u for u in engine.updates[row] if u.tokens)
            assert len(first.prompt_logprobs) == (length - 1 if i % 2 else 0)
    assert engine.pool.high_water <= engine.pool.total
    assert engine.pool.used == 0


def test_a22_throughput_is_back_after_memory_pressure_and_thrash_is_bounded() -> None:
    """Rows whose answers need three times the cache: many are stopped. The tokens computed twice stay a fraction of
    all, and afterwards a decode step takes as many rows as before."""
    engine = TurnedEngine(replace(SMALL, max_slots=8, max_context=128), max_context=128, num_pages=65)
    asked = [(prompt(16, i), 100) for i in range(8)]  # 29 pages each at their end, 64 in all

    def decode_rate() -> float:
        start = len(engine.runner.batches)
        rows = engine.submit(*[generate_row(prompt(4, 500 + i), 8) for i in range(8)])
        engine.clock.advance(0.01)
        engine.run()
        steps = [b for b in engine.runner.batches[start:] if b.bucket.kind is Kind.DECODE]
        assert all(engine.last(row).error is None for row in rows)
        return sum(int((b.length > 0).sum()) for b in steps) / len(steps)

    before = decode_rate()
    rows = engine.submit(*(generate_row(p, n) for p, n in asked))
    engine.clock.advance(0.01)
    start = len(engine.runner.batches)
    engine.run()
    assert engine.scheduler.num_preempted > 0
    for row, (p, n) in zip(rows, asked, strict=True):
        assert engine.tokens(row) == engine.model.generate(p, n)
    computed = sum(int(b.length.sum()) for b in engine.runner.batches[start:])
    needed = sum(len(p) + n - 1 for p, n in asked)
    assert computed < 1.5 * needed
    assert engine.pool.used == 0
    assert decode_rate() >= 0.95 * before


@pytest.mark.parametrize("where", ["fail_submit", "fail_result"])
def test_a37_a_fault_after_dispatch_costs_its_own_rows_and_a_hundred_requests_later_all_is_well(where: str) -> None:
    """The donated cache is gone with the step (the fake device refuses every later one until it is reset)."""
    engine = TurnedEngine(**{where: [3, 9, 10]})
    rows: list[Sequence] = []
    while len(engine.runner.batches) <= 10:
        rows += engine.submit(*[generate_row(prompt(6, i), 6) for i in range(8)])
        engine.run()
    assert engine.runner.num_resets >= 2
    for i, row in enumerate(rows):
        assert engine.last(row).error is not None or engine.tokens(row) == engine.model.generate(prompt(6, i % 8), 6)
    for i in range(100):
        (row,) = engine.submit(generate_row(prompt(6, 100 + i), 2))
        engine.run()
        assert engine.tokens(row) == engine.model.generate(prompt(6, 100 + i), 2)
    assert engine.pool.used == 0
