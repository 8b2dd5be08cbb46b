"""The dual threshold, and what the well-known snippet of it gets wrong."""

import pytest
from msgspec.structs import replace

from serving.config import EngineConfig
from serving.engine.former import BatchFormer
from serving.types import Prepared, Priority
from tests.fakes_engine import SMALL, TurnedEngine, generate_row

CONFIG = EngineConfig(hard_size=16, soft_size=8, max_wait_ms=5.0, min_tokens=1024)


@pytest.mark.parametrize(
    ("rows", "tokens", "urgent", "waited_s", "idle", "ready"),
    [
        (0, 0, True, 9.0, True, False),
        (1, 9, False, 0.0, True, True),
        (15, 99, False, 0.0049, False, False),
        (16, 99, False, 0.0, False, True),
        (7, 99, True, 0.0, False, False),
        (8, 99, True, 0.0, False, True),
        (8, 99, False, 0.0, False, False),
        (1, 9, False, 0.005, False, True),
        (1, 1023, False, 0.0, False, False),
        (1, 1024, False, 0.0, False, True),
    ],
)
def test_ready(rows: int, tokens: int, urgent: bool, waited_s: float, idle: bool, ready: bool) -> None:
    former = BatchFormer(CONFIG)
    asked = former.ready(rows=rows, tokens=tokens, urgent=urgent, waited_s=waited_s, idle=idle, oldest=0, arrived=rows)
    assert asked is ready


def test_all_that_wait_when_a_batch_goes_are_due() -> None:
    former = BatchFormer(CONFIG)
    calm = {"tokens": 9, "urgent": False, "waited_s": 0.0, "idle": False}
    assert former.ready(rows=17, oldest=0, arrived=17, **calm)
    assert former.ready(rows=1, oldest=16, arrived=18, **calm)
    assert not former.ready(rows=1, oldest=17, arrived=18, **calm)


def busy(**changes: object) -> TurnedEngine:
    engine = TurnedEngine(replace(SMALL, hard_size=16, soft_size=8, **changes))
    engine.submit(generate_row((5, 6, 7), 50))
    engine.loop.turn()
    return engine


def scores(count: int) -> list[Prepared]:
    return [Prepared((9, 1 + i % 200, 3), targets=(1,)) for i in range(count)]


def test_two_hundred_short_rows_in_two_hundred_out() -> None:
    """The snippet drops what comes while a batch is full but under its token floor."""
    engine = busy(min_tokens=1024)
    rows = engine.submit(*scores(200))
    engine.run()
    assert all(engine.ended(row) and engine.last(row).error is None for row in rows)


def test_seven_rows_and_then_silence_are_answered() -> None:
    """The snippet flushes only when the next request comes."""
    engine = busy()
    rows = engine.submit(*scores(7))
    for _ in range(5):
        engine.loop.turn()
    assert not any(engine.updates[row] for row in rows)
    engine.clock.advance(SMALL.max_wait_ms / 1000)
    for _ in range(4):
        engine.loop.turn()
    assert all(engine.ended(row) for row in rows)


def test_an_urgent_ninth_goes_with_the_eight_that_it_flushes() -> None:
    """The snippet leaves the request that tips the scale behind."""
    engine = busy()
    rows = engine.submit(*scores(8))
    for _ in range(5):
        engine.loop.turn()
    rows += engine.submit(*scores(1), priority=Priority.URGENT)
    for _ in range(8):  # 9 rows take three steps, between those of the stream; no time passes
        engine.loop.turn()
    assert all(engine.ended(row) for row in rows)


def test_prompts_gather_beside_a_running_stream() -> None:
    engine = busy(max_slots=32)
    prompts = engine.submit(*[generate_row((8, i + 1), 1) for i in range(3)])
    for _ in range(6):
        engine.loop.turn()
    assert not any(engine.updates[row] for row in prompts)
    engine.clock.advance(SMALL.max_wait_ms / 1000)
    for _ in range(3):
        engine.loop.turn()
    assert all(engine.ended(row) for row in prompts)
