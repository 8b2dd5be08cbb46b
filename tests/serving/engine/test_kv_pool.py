"""Page bookkeeping, against a model that is a dict of sets."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from serving.engine.kv_pool import KvPool, PoolError


def test_page_zero_is_never_given_out() -> None:
    pool = KvPool(9, 4)
    assert sorted(pool.take("a", 8)) == list(range(1, 9))
    assert (pool.used, pool.free, pool.total, pool.high_water) == (8, 0, 8, 8)


def test_taking_too_much_changes_nothing() -> None:
    pool = KvPool(5, 4)
    pool.take("a", 3)
    with pytest.raises(PoolError, match="takes 2 pages, 1 are free"):
        pool.take("b", 2)
    assert pool.used == 3
    assert pool.held_by("b") == frozenset()


def test_double_release_raises() -> None:
    pool = KvPool(5, 4)
    pool.take("a", 3)
    assert pool.release("a") == []
    assert pool.free == 4
    with pytest.raises(PoolError, match="released twice"):
        pool.release("a")


def test_shared_pages_live_as_long_as_their_last_owner() -> None:
    pool = KvPool(5, 4)
    pages = pool.take("a", 2)
    pool.share("b", pages)
    assert pool.used == 2
    pool.release("a")
    assert (pool.used, pool.free) == (2, 2)
    pool.release("b")
    assert (pool.used, pool.free) == (0, 4)


def test_kept_pages_are_cached_until_they_are_discarded_or_shared() -> None:
    pool = KvPool(5, 4)
    first, second = pool.take("a", 2)
    pool.keep(first)
    assert pool.release("a") == [first]
    assert (pool.used, pool.cached, pool.free) == (0, 1, 3)
    assert not pool.is_used(first)
    pool.share("b", [first])
    assert (pool.used, pool.cached) == (1, 0)
    pool.discard(first)
    assert pool.used == 1
    assert pool.release("b") == []
    assert (pool.cached, pool.free) == (0, 4)
    with pytest.raises(PoolError, match="not kept"):
        pool.discard(first)
    with pytest.raises(PoolError, match="nothing to keep"):
        pool.keep(second)


def test_sharing_what_is_free_or_held_already_raises() -> None:
    pool = KvPool(5, 4)
    pages = pool.take("a", 1)
    for owner, page in (("b", 4 if pages == [1] else 1), ("a", pages[0])):
        with pytest.raises(PoolError, match="cannot share"):
            pool.share(owner, [page])


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_pages_for(tokens: int, pages: int) -> None:
    assert KvPool(9, 4).pages_for(tokens) == pages


@pytest.mark.parametrize(("num_pages", "page_size"), [(1, 4), (0, 4), (5, 0)])
def test_a_pool_without_pages_is_refused(num_pages: int, page_size: int) -> None:
    with pytest.raises(ValueError, match="a pool needs"):
        KvPool(num_pages, page_size)


VERBS = ["take", "share", "release", "keep", "discard"]


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from(VERBS), st.integers(0, 6))))
def test_random_use_agrees_with_a_dict_of_sets(events: list[tuple[int, str, int]]) -> None:
    pool, held, kept = KvPool(12, 4), dict[int, set[int]](), set[int]()
    for owner, verb, count in events:
        used = set().union(*held.values()) if held else set()
        if verb == "take" and count <= 11 - len(used | kept):
            pages = pool.take(owner, count)
            assert not set(pages) & (used | kept)
            held.setdefault(owner, set()).update(pages)
        elif verb == "share":
            pages = sorted((used | kept) - held.get(owner, set()))[:count]
            pool.share(owner, pages)
            held.setdefault(owner, set()).update(pages)
        elif verb == "release" and owner in held:
            mine = held.pop(owner)
            others = set().union(*held.values()) if held else set()
            assert set(pool.release(owner)) == (mine - others) & kept
        elif verb == "keep":
            for page in sorted(used)[:count]:
                pool.keep(page)
                kept.add(page)
        elif verb == "discard":
            for page in sorted(kept)[:count]:
                pool.discard(page)
                kept.remove(page)
        used = set().union(*held.values()) if held else set()
        assert (pool.used, pool.cached) == (len(used), len(kept - used))
        assert pool.free == 11 - len(used | kept)
        assert all(pool.held_by(o) == frozenset(pages) for o, pages in held.items())
