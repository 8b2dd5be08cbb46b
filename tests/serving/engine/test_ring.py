"""Pages that come round: what the device would read through the table is what it wrote last and may see."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.architecture import Window
from serving.config import EngineConfig
from serving.engine.host_tier import HostTier
from serving.engine.kv_tiers import KvTiers
from serving.engine.profiles import Profiles
from serving.engine.ring import Ring
from serving.errors import BadRequest
from serving.loading import windowed
from tests.fakes import FakeRunner, ToyModel
from tests.fakes_engine import SMALL, TurnedEngine, generate_row

chunks = st.lists(st.integers(1, 12), min_size=1, max_size=30)


@given(st.integers(1, 40), st.integers(0, 20), st.integers(1, 9), chunks)
def test_a_step_overwrites_nothing_that_one_of_its_queries_sees(window, sinks, page_size, steps):
    ring = Ring.of(window, sinks, page_size, max(steps))
    table = ring.table(range(1, ring.size + 1), -(-sum(steps) // page_size))
    held: dict[tuple[int, int], int] = {}  # page, place in it -> position
    start = 0
    for tokens in steps:
        for position in range(start, start + tokens):
            held[int(table[position // page_size]), position % page_size] = position
        for query in range(start, start + tokens):
            for key in range(query + 1):
                if key > query - window or key < sinks:
                    assert held[int(table[key // page_size]), key % page_size] == key
        start += tokens


def test_4096_tokens_hold_a_tenth_of_their_pages_at_most():
    _, ring = windowed(EngineConfig(), Window(128, 4))
    assert ring.size <= 0.1 * 4096 / EngineConfig().page_size


@given(st.integers(1, 30), st.integers(0, 9))
def test_the_table_holds_every_page_and_those_of_the_sinks_once(window, sinks):
    ring = Ring.of(window, sinks, 4, 8)
    pages = np.random.default_rng(0).permutation(ring.size) + 1
    table = ring.table(pages.tolist(), 3 * ring.size)
    assert set(table.tolist()) == set(pages.tolist())
    assert table[: ring.size].tolist() == pages.tolist()
    assert all((table == page).sum() == 1 for page in pages[: ring.fixed])


RING = Ring.of(window=8, sinks=2, page_size=SMALL.page_size, most=SMALL.prefill_chunk)  # 6 pages of 4


def test_a_long_row_comes_in_and_runs_with_the_pages_of_its_ring() -> None:
    """The pool has not half of what it would need."""
    engine = TurnedEngine(ring=RING, model=ToyModel(window=(8, 2)), num_pages=2 * RING.size + 3)
    asked = [(tuple(range(2, 42)), 20), (tuple(range(3, 33)), 30)]
    rows = engine.submit(*(generate_row(*each) for each in asked))
    for _ in range(12):
        engine.loop.turn()
        assert all(len(row.pages) <= RING.size for row in rows)
    engine.run()
    assert [engine.tokens(row) for row in rows] == [engine.model.generate(*each) for each in asked]
    assert engine.scheduler.num_preempted == 0
    assert engine.pool.used == engine.pool.cached == 0  # nothing of theirs can be shared


def test_rows_that_fit_their_ring_share_pages() -> None:
    engine = TurnedEngine(ring=RING)
    prompt = tuple(range(2, 20))
    for cached in (0, 16):
        (row,) = engine.submit(generate_row(prompt, 3))
        engine.run()
        assert engine.tokens(row) == engine.model.generate(prompt, 3)
        assert row.num_cached == cached


def host_tiers(runner: FakeRunner) -> KvTiers:
    return KvTiers(HostTier(10_000), Profiles(runner.page_bytes, 1_000), page_size=SMALL.page_size)


def test_a_profile_that_could_not_be_kept_is_refused_with_the_numbers() -> None:
    engine = TurnedEngine(ring=RING, make_tiers=host_tiers)
    engine.submit(generate_row(tuple(range(2, 22)), 5), profile="fits")
    with pytest.raises(BadRequest, match=r"may have 25 tokens; .* kept for 24 at most"):
        engine.submit(generate_row(tuple(range(2, 22)), 6), profile="long")
