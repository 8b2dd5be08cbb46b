"""What the loop counts: steps, tokens, padding, and whose fault an idle device is."""

from collections.abc import Callable

import pytest

from serving.batch import Bucket, Kind
from serving.engine.masks import Masks
from serving.types import Prepared
from tests.fakes_constraint import Slotted
from tests.fakes_engine import TurnedEngine, generate_row


def test_steps_rows_tokens_and_padding_are_counted_by_kind() -> None:
    engine = TurnedEngine()
    engine.submit(generate_row((1, 2, 3), 4), Prepared((4, 5), targets=(1,)))
    engine.run()
    stats = engine.stats
    assert (stats.steps[Kind.EXTEND], stats.steps[Kind.DECODE], stats.steps[Kind.SCORE]) == (1, 3, 1)
    assert (stats.tokens[Kind.EXTEND], stats.tokens[Kind.DECODE], stats.tokens[Kind.SCORE]) == (3, 3, 2)
    for batch in engine.runner.batches:
        stats.padding[batch.bucket.kind] -= batch.bucket.rows * batch.bucket.tokens - int(batch.length.sum())
    assert set(stats.padding.values()) == {0}
    assert (stats.generated_tokens, stats.finished_rows) == (4, 2)


def test_time_without_work_is_idle_and_no_stall() -> None:
    engine = TurnedEngine()
    engine.clock.advance(3.0)
    for _ in range(2):
        engine.submit(Prepared((4, 5), targets=(1,)))
        engine.run()
        engine.clock.advance(5.0)
    assert engine.stats.device_idle_s == pytest.approx(3.0 + 5.0)
    assert engine.stats.device_stall_s == 0.0


def test_time_with_work_waiting_and_no_step_out_is_a_stall() -> None:
    """Three rows wait below the threshold behind a long step; the host takes 2 s from its end to the next dispatch."""
    engine = TurnedEngine()
    engine.submit(generate_row((1, 2, 3), 1))
    engine.loop.turn()
    engine.submit(*[Prepared((4, i + 1), targets=(1,)) for i in range(3)])
    engine.loop.turn()  # reads the first step; nothing was dispatched behind it
    engine.clock.advance(2.0)
    engine.run()
    assert engine.stats.device_stall_s == pytest.approx(2.0)
    assert engine.stats.device_idle_s == 0.0


def test_what_steps_take_is_learned_from_those_that_the_host_waited_for() -> None:
    engine = TurnedEngine(ms_per_token=1.0)
    engine.submit(generate_row((1, 2, 3), 20))
    engine.run()
    one = Bucket(Kind.DECODE, 1, 1, 4)
    assert engine.costs.seconds(one) == pytest.approx(0.001)
    assert engine.costs.seconds(Bucket(Kind.EXTEND, 1, 64, 16)) == pytest.approx(0.064)
    assert engine.stats.device_stall_s == 0.0


def test_a_step_that_ended_unnoticed_is_a_stall_for_as_long_as_its_usual_time_is_over() -> None:
    """Steps of 1 ms that are done when they are asked for; the host is 5 ms late once."""
    engine = TurnedEngine(ms_per_token=1.0)
    engine.submit(generate_row((1, 2, 3), 20))
    for _ in range(6):
        engine.loop.turn()
    assert engine.stats.device_stall_s == 0.0
    engine.timed.early = True
    engine.loop.turn()  # one step is out now, begun when the one before it was read
    engine.clock.advance(0.005)
    engine.loop.turn()
    assert engine.stats.device_stall_s == pytest.approx(0.004, abs=1e-6)


def test_time_after_a_row_that_ends_without_a_step_that_is_read_is_idle() -> None:
    """Its constraint is fulfilled, it is cancelled or it runs out of time when nothing is on the device."""
    engine = TurnedEngine()
    later: list[Callable[[], None]] = []
    engine.scheduler._masks = Masks(later.append)
    for end in ("mask", "cancel", "deadline"):
        deadline_s = engine.clock() + 1.0 if end == "deadline" else None
        row = generate_row((1, 2, 3), 5, constraint=Slotted([[7]]))
        (sequence,) = engine.submit(row, deadline_s=deadline_s)
        while not later:
            engine.loop.turn()
        engine.loop.turn()
        if end == "deadline":
            engine.clock.advance(1.0)
        elif end == "cancel":
            engine.cancel(sequence)
        later.pop()()
        engine.loop.turn()
        assert engine.ended(sequence)
        assert engine.loop.idle
        engine.clock.advance(5.0)
    engine.submit(generate_row((1, 2, 3), 1))
    engine.run()
    assert engine.stats.device_idle_s == pytest.approx(15.0)
    assert engine.stats.device_stall_s == pytest.approx(1.0)  # the row that waited for its mask until its deadline


def test_time_before_and_after_a_step_that_could_not_be_dispatched_is_counted_once() -> None:
    engine = TurnedEngine(fail_submit=[0])
    for _ in range(3):
        engine.clock.advance(5.0)
        engine.submit(generate_row((1, 2, 3), 1))
        engine.run()
    assert engine.stats.failed_rows == 1
    assert engine.stats.device_idle_s == pytest.approx(15.0)
    assert engine.stats.device_stall_s == 0.0


def test_time_before_the_device_is_ready_is_not_idle() -> None:
    engine = TurnedEngine()
    engine.clock.advance(60.0)
    engine.loop.begin()
    engine.clock.advance(2.0)
    engine.submit(generate_row((1, 2, 3), 1))
    engine.run()
    assert engine.stats.device_idle_s == pytest.approx(2.0)
