"""What stays of a row's pages, who shares them, and what goes first."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from serving.engine.kv_pool import KvPool, PoolError
from serving.engine.lru_k import LruK
from serving.engine.prefix_cache import PrefixCache


def make(num_pages: int = 9, *, enabled: bool = True) -> tuple[KvPool, PrefixCache]:
    pool = KvPool(num_pages, 4)
    return pool, PrefixCache(pool, LruK(correlated_s=0.0, max_history=64), enabled=enabled)


def keys(name: str, count: int) -> list[bytes]:
    return [f"{name}{i}".encode() for i in range(count)]


def fill(cache: PrefixCache, name: str, count: int, now_s: float) -> list[int]:
    """A row that comes, computes `count` whole pages, and goes."""
    pages = cache.take(name, count)
    for place, (key, page) in enumerate(zip(keys(name, count), pages, strict=True)):
        cache.register(key, place, page, now_s)
    cache.release(name)
    return pages


def test_pages_of_a_row_that_is_gone_are_found_and_shared() -> None:
    pool, cache = make()
    pages = fill(cache, "a", 3, 0.0)
    assert (pool.used, pool.cached, pool.free, cache.available) == (0, 3, 5, 8)
    assert cache.match(keys("a", 3)) == pages
    assert cache.match([*keys("a", 2), b"other"]) == pages[:2]
    assert cache.match([b"other", *keys("a", 3)]) == []
    assert cache.num_idle(pages) == 3
    assert cache.share("row", keys("a", 2), 1.0) == pages[:2]
    assert (pool.used, pool.cached, cache.num_idle(pages)) == (2, 1, 1)
    assert cache.share("twin", keys("a", 3), 1.0) == pages
    cache.release("row")
    assert pool.used == 3
    cache.release("twin")
    assert pool.cached == 3


def test_the_tail_of_a_chain_goes_before_its_head_and_what_is_used_stays() -> None:
    pool, cache = make()
    pages = fill(cache, "a", 4, 0.0)
    cache.share("row", keys("a", 1), 1.0)
    taken = cache.take("new", 6)
    assert set(taken) >= {pages[3], pages[2]}
    assert cache.match(keys("a", 4)) == pages[:2]
    assert cache.num_evicted == 2
    with pytest.raises(PoolError, match="takes 2 pages, 1 are free"):
        cache.take("more", 2)
    assert pool.held_by("row") == {pages[0]}


def test_what_was_used_often_outlives_a_scan() -> None:
    _, cache = make(17)
    fill(cache, "hot", 2, 0.0)
    for i in range(1, 4):
        cache.share("row", keys("hot", 2), i * 10.0)
        cache.release("row")
    for i in range(50):
        fill(cache, f"once{i}.", 3, 40.0 + i)
    assert len(cache.match(keys("hot", 2))) == 2


def test_the_second_of_two_equal_pages_stays_its_rows_own() -> None:
    pool, cache = make()
    (first,), (second,) = cache.take("a", 1), cache.take("b", 1)
    cache.register(b"same", 0, first, 0.0)
    cache.register(b"same", 0, second, 0.0)
    assert cache.match([b"same"]) == [first]
    cache.release("b")
    assert (pool.used, pool.free) == (1, 7)


def test_after_clear_nothing_is_found_and_rows_keep_their_pages() -> None:
    pool, cache = make()
    fill(cache, "a", 3, 0.0)
    cache.share("row", keys("a", 2), 1.0)
    cache.clear()
    assert (pool.used, pool.cached, pool.free) == (2, 0, 6)
    assert cache.match(keys("a", 3)) == []
    cache.release("row")
    assert pool.free == 8


def test_a_cache_that_is_off_keeps_nothing() -> None:
    pool, cache = make(enabled=False)
    fill(cache, "a", 3, 0.0)
    assert (pool.cached, pool.free) == (0, 8)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 4), st.booleans()), max_size=60))
def test_random_rows_never_lose_a_page_and_never_find_a_wrong_one(events: list[tuple[str, int, bool]]) -> None:
    pool, cache = make(13)
    content: dict[int, bytes] = {}
    for now, (name, count, let_go) in enumerate(events):
        owner = f"row {now}"
        wanted = keys(name, count)
        known = cache.match(wanted)
        assert [content[page] for page in known] == wanted[: len(known)]
        if count - len(known) + cache.num_idle(known) > cache.available:
            continue
        pages = cache.share(owner, wanted[: len(known)], float(now))
        pages += cache.take(owner, count - len(known))
        for place, (key, page) in enumerate(zip(wanted, pages, strict=True)):
            if place >= len(known):
                content[page] = key
            cache.register(key, place, page, float(now))
        if let_go:
            cache.release(owner)
        assert pool.used + pool.cached + pool.free == pool.total


def test_what_may_be_wanted_again_is_told_before_it_goes() -> None:
    told: list[tuple[bytes, int]] = []
    pool = KvPool(9, 4)
    lru: LruK[bytes] = LruK(correlated_s=1.0, max_history=64)
    cache = PrefixCache(pool, lru, evicted=lambda key, page: told.append((key, page)))
    _, twice, prized = (fill(cache, name, 2, 0.0) for name in "abc")
    cache.share("row", keys("b", 2), 0.5)  # in one burst with the first use
    cache.release("row")
    cache.share("row", keys("b", 1), 5.0)
    cache.release("row")
    cache.prize([*keys("c", 2), b"unknown"])
    cache.take("new", 8)
    assert sorted(told) == sorted([(b"b0", twice[0]), (b"c0", prized[0]), (b"c1", prized[1])])
    cache.release("new")
    fill(cache, "c", 2, 9.0)  # prized no more, but used twice by now
    cache.take("newer", 8)
    assert {key for key, _ in told[3:]} == {b"c0", b"c1"}
