"""Who makes room for whom, turned by hand in small caches."""

import pytest
from msgspec.structs import replace

from serving.engine.running import Running
from serving.engine.sequence import Sequence
from serving.types import Priority
from tests.fakes_engine import SMALL, TurnedEngine, generate_row, prompt


def test_a_row_that_grows_stops_none_of_a_higher_class() -> None:
    """An old low row and a young urgent one fill the cache together: the low one is stopped, once."""
    engine = TurnedEngine(num_pages=13)
    (low,) = engine.submit(generate_row(prompt(4), 40), priority=Priority.LOW)
    for _ in range(5):
        engine.loop.turn()
    engine.clock.advance(10.0)
    (urgent,) = engine.submit(generate_row(prompt(4, 1), 30), priority=Priority.URGENT)
    engine.clock.advance(SMALL.max_wait_ms / 1000)
    engine.run()
    assert urgent.run == 0
    assert low.run == engine.scheduler.num_preempted == 1
    assert engine.tokens(low) == engine.model.generate(prompt(4), 40)
    assert engine.tokens(urgent) == engine.model.generate(prompt(4, 1), 30)


@pytest.mark.parametrize("shared", [False, True])
def test_no_row_is_stopped_where_that_would_not_help(shared: bool) -> None:
    """What it holds is not enough beside what the others need to grow, or is held by another row too."""
    engine = TurnedEngine(num_pages=11)
    begin = prompt(8)
    (urgent,) = engine.submit(generate_row(begin + prompt(12, 1), 8), priority=Priority.URGENT)
    for _ in range(4):
        engine.loop.turn()
    low_begin = begin if shared else prompt(4, 2)
    (low,) = engine.submit(generate_row((*low_begin, 1), 8), priority=Priority.LOW)
    engine.loop.turn()
    assert (len(urgent.pages), len(low.pages), engine.pool.used) == ((6, 3, 7) if shared else (6, 2, 8))
    (normal,) = engine.submit(generate_row(prompt(20 if shared else 16, 3), 2))  # 5 or 4 pages; 3 or 2 are free
    while not engine.ended(urgent):
        assert not engine.updates[normal]
        engine.loop.turn()
    engine.run()
    assert low.run == 0
    assert engine.ended(normal)


def test_a_queue_of_one_prompt_costs_no_look_at_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TurnedEngine(num_pages=33)
    rows = engine.submit(*[generate_row(prompt(40), 1, temperature=1.0, seed=i) for i in range(500)])
    looks: list[Sequence] = []
    reusable = Running._reusable

    def counted(running: Running, row: Sequence) -> list[bytes]:
        looks.append(row)
        return reusable(running, row)

    monkeypatch.setattr(Running, "_reusable", counted)
    engine.loop.turn()
    assert len(looks) < 100
    engine.run()
    assert all(engine.ended(row) for row in rows)


def test_an_urgent_row_does_not_wait_for_a_prompt_that_others_go_before() -> None:
    """Its beginning is being computed for a low row, which a flood of urgent prompts passes by."""
    engine = TurnedEngine(replace(SMALL, max_slots=8), num_pages=200)
    (low,) = engine.submit(generate_row(prompt(60), 1), priority=Priority.LOW)
    engine.loop.turn()
    (urgent,) = engine.submit(generate_row((*prompt(60)[:58], 1, 2), 1), priority=Priority.URGENT)
    others = [engine.submit(generate_row(prompt(60, 9), 1), priority=Priority.URGENT, tenant="other")[0]]
    while not engine.ended(urgent):
        engine.loop.turn()
        others += engine.submit(generate_row(prompt(60, 9 + len(others)), 1), priority=Priority.URGENT, tenant="other")
    assert not any(engine.ended(row) for row in others[1:])
    engine.run()
    assert engine.tokens(low) == engine.model.generate(prompt(60), 1)
