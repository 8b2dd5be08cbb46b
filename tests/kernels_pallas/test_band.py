"""The walks over a band are those blocks, and those queries, that brute force finds, and no others."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels_pallas.band import FAR, Band

BANDS = st.builds(Band, window=st.none() | st.integers(1, 30), sinks=st.integers(0, 20))
POSITIONS = st.integers(0, 60)


def sees(band: Band, query: int, key: int) -> bool:
    return key <= query and (band.window is None or query - key < band.window or key < band.sinks)


@given(BANDS, POSITIONS, POSITIONS)
def test_a_query_sees_its_window_and_the_sinks(band, query, key):
    assert bool(band.sees(jnp.int32(query), jnp.int32(key))) == sees(band, query, key)
    later = any(sees(band, later, key) for later in range(query, 200))
    assert bool(band.keeps(jnp.int32(query), jnp.int32(key))) == (later or key > query)


@given(BANDS, POSITIONS, st.integers(-1, 10), POSITIONS, st.integers(1, 16))
def test_the_keys_of_queries_are_the_blocks_that_any_of_them_sees(band, first, more, end, size):
    """And one more at most, where a row's keys end before the window."""
    walk = band.keys(jnp.int32(first), jnp.int32(first + more), jnp.int32(end), size)
    blocks = [int(walk.block(jnp.int32(index))) for index in range(int(walk.length))]
    queries = range(first, first + more + 1)
    seen = {key // size for key in range(end) if any(sees(band, query, key) for query in queries)}
    assert blocks == sorted(set(blocks))
    assert seen <= set(blocks)
    if seen != set(blocks):
        assert len(blocks) == len(seen) + 1
        assert end <= first - band.window + 1
    past = int(walk.block(walk.length)) * size
    assert not any(sees(band, query, key) for query in queries for key in range(past, min(past + size, end)))


@given(BANDS, POSITIONS, st.integers(1, 16), st.integers(1, 60))
def test_the_queries_of_keys_are_those_from_the_first_to_the_last_that_sees_any(band, first, size, end):
    start, stop = (int(x) for x in band.queries(jnp.int32(first), jnp.int32(first + size - 1), jnp.int32(end)))
    found = [
        query for query in range(150) if any(sees(band, query, key) for key in range(first, min(first + size, end)))
    ]
    if not found:
        assert start >= stop
        return
    assert start == found[0]
    assert stop == (FAR if found[-1] == 149 else found[-1] + 1)


def test_rows_are_walked_side_by_side():
    walk = Band(window=4, sinks=2).keys(jnp.array([9, 0]), jnp.array([9, 3]), jnp.array([10, 10]), 2)
    np.testing.assert_array_equal(walk.length, [3, 2])
    np.testing.assert_array_equal([walk.block(jnp.array([i, i])) for i in range(2)], [[0, 0], [3, 1]])


@pytest.mark.parametrize(("window", "sinks"), [(0, 0), (-3, 0), (4, -1)])
def test_a_band_of_nothing_is_refused(window, sinks):
    with pytest.raises(ValueError, match=r"must be at least"):
        Band(window, sinks)
