"""What the gauges say of pages, against counts by hand, and that a leak made on purpose is found."""

import logging

import pytest

from serving.engine.gauges import Gauges
from serving.types import Prepared
from tests.fakes_engine import TurnedEngine, generate_row

PAGE_SIZE = 4


def make(num_pages: int = 33) -> tuple[TurnedEngine, Gauges]:
    engine = TurnedEngine(num_pages=num_pages)
    return engine, Gauges(engine.stats, engine.scheduler, engine.pool)


def run(engine: TurnedEngine, *rows: Prepared) -> None:
    engine.submit(*rows)
    while not engine.loop.idle:
        engine.loop.turn()


def test_room_beyond_a_rows_tokens_is_internal_fragmentation() -> None:
    engine, gauges = make()
    (row,) = engine.submit(generate_row((5, 6, 7, 8, 9), 20))
    seen = []
    while not engine.loop.idle:
        engine.loop.turn()
        gauges.read(1.0)
        if row.pages:
            tokens = int(engine.scheduler.running.slots.position[row.slot])  # of prompt and output, by now
            room = len(row.pages) * PAGE_SIZE
            assert engine.stats.internal_fragmentation == pytest.approx((room - tokens) / room)
            seen.append(engine.stats.internal_fragmentation)
    assert seen[0] == pytest.approx(3 / 8)  # five tokens in two pages
    assert 0.0 in seen
    assert engine.stats.internal_fragmentation == 0.0
    assert engine.stats.pages_used == 0


def test_shared_pages_are_full_and_count_once() -> None:
    engine, gauges = make()
    run(engine, generate_row(tuple(range(1, 9)), 1))  # leaves two whole pages
    engine.submit(*[generate_row((*range(1, 9), 20 + i), 3) for i in range(2)])
    engine.loop.turn()
    gauges.read(1.0)
    assert engine.stats.pages_used == 4  # two shared, one for each row's ninth token
    assert engine.stats.internal_fragmentation == pytest.approx((2 * 3) / (4 * PAGE_SIZE))


@pytest.mark.parametrize("count", [1, 3])
def test_pages_of_an_owner_that_is_no_row_are_leaked(count: int, caplog: pytest.LogCaptureFixture) -> None:
    engine, gauges = make()
    run(engine, generate_row((1, 2, 3, 4, 5), 2))
    gauges.audit()
    assert engine.stats.pages_leaked == 0
    engine.pool.take("ghost", count)
    with caplog.at_level(logging.ERROR, "tidegate.engine"):
        for _ in range(2):
            gauges.audit()
    assert engine.stats.pages_leaked == count
    assert [record.getMessage().split()[0] for record in caplog.records] == [str(count)]
    engine.pool.release("ghost")
    run(engine, generate_row((9, 9, 9), 2))
    gauges.audit()
    assert engine.stats.pages_leaked == 0


def test_pages_of_running_rows_and_cached_ones_are_not() -> None:
    engine, gauges = make()
    run(engine, generate_row(tuple(range(1, 12)), 2))
    assert engine.pool.cached == 3  # 11 tokens and one more were computed
    engine.submit(generate_row(tuple(range(50, 60)), 5), generate_row(tuple(range(1, 12)), 5))
    engine.loop.turn()
    gauges.audit()
    assert engine.pool.used > 0
    assert engine.stats.pages_leaked == 0


def test_a_cached_page_that_the_cache_has_lost_is_leaked() -> None:
    engine, gauges = make()
    cache = engine.scheduler.cache
    run(engine, generate_row(tuple(range(1, 10)), 2))
    page = next(iter(cache.pages))
    del cache._name_of[page]
    gauges.audit()
    assert engine.stats.pages_leaked == 1


def test_a_cached_page_that_cannot_be_evicted_is_external_fragmentation() -> None:
    engine, gauges = make(num_pages=21)
    cache = engine.scheduler.cache
    run(engine, generate_row(tuple(range(1, 10)), 2))
    gauges.read(1.0)
    assert engine.stats.external_fragmentation == 0.0
    assert cache._lru.victim() is not None  # taken out of the order, and not evicted
    gauges.read(1.0)
    assert engine.stats.external_fragmentation == pytest.approx(1 / 20)


def test_an_engine_that_gave_out_no_pages_is_not_audited(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, gauges = make()
    run(engine, generate_row((1, 2, 3), 2))
    gauges.audit()
    monkeypatch.setattr(engine.pool, "num_leaked", lambda *_: pytest.fail("every page was looked at again"))
    run(engine, Prepared((1, 2, 3), targets=(4,)))
    gauges.audit()


def test_the_share_of_time_that_the_device_waited() -> None:
    engine, gauges = make()
    engine.stats.device_stall_s = 0.5
    gauges.read(2.0)
    assert engine.stats.stall_ratio == 0.25
    gauges.read(0.0)
    assert engine.stats.stall_ratio == 0.0
