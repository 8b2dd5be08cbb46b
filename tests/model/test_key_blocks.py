"""Attention in blocks of keys, against float64 over the whole row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.architecture import Window
from model.cache import PageView
from model.key_blocks import KeyBlocks

TOKENS, GROUPS, HEADS, DIM, PAGE, SIZE = 3, 2, 2, 4, 4, 8
RNG = np.random.default_rng(0)
POSITIONS = np.array([0, 9, 21], np.int32)
Q = RNG.standard_normal((TOKENS, GROUPS, HEADS, DIM), np.float32)
CONTENT = RNG.standard_normal((TOKENS, 24, 2, GROUPS, DIM)).astype(np.float32)  # keys and values by position


def split(read):
    return read(0, GROUPS), read(GROUPS, 2 * GROUPS)


def paged(num_pages: int, fill: float, page: int = PAGE) -> tuple[np.ndarray, np.ndarray]:
    """A pool whose pages lie in any order and hold `fill` beyond each token's position, and a table of that width."""
    pool = np.full((1 + TOKENS * num_pages, 2 * GROUPS, page, DIM), fill, np.float32)
    table = 1 + RNG.permutation(TOKENS * num_pages).astype(np.int32).reshape(TOKENS, num_pages)
    for token, position in enumerate(POSITIONS):
        for at in range(position + 1):
            pool[table[token, at // page], :, at % page] = CONTENT[token, at].reshape(-1, DIM)
    return pool, table


@jax.jit
def attend(pool, table, positions):
    positions = positions[:, None]  # one query a row
    return KeyBlocks(pool, table, positions, positions[:, 0] + 1, SIZE).attend(jnp.asarray(Q)[:, None], split, 0.5)[
        :, 0
    ]


def one(q: np.ndarray, row: int, position: int, window: Window | None = None) -> np.ndarray:
    """Softmax over all keys up to the position that the window shows, float64."""
    visible = [s for s in range(position + 1) if window is None or s > position - window.size or s < window.sinks]
    seen = CONTENT[row, visible].astype(np.float64)
    out = np.zeros((GROUPS, HEADS, DIM))
    for g in range(GROUPS):
        scores = q[g].astype(np.float64) @ seen[:, 0, g].T * 0.5
        p = np.exp(scores - scores.max(-1, keepdims=True))
        out[g] = (p / p.sum(-1, keepdims=True)) @ seen[:, 1, g]
    return out


def reference() -> np.ndarray:
    return np.stack([one(q, row, position) for row, (q, position) in enumerate(zip(Q, POSITIONS, strict=True))])


@pytest.mark.parametrize("num_pages", [6, 7, 11])
def test_equals_the_softmax_over_all_keys(num_pages):
    got = attend(*paged(num_pages, 0.0), POSITIONS)
    np.testing.assert_allclose(got, reference(), atol=1e-6)


def test_width_of_the_table_and_what_pages_held_before_change_no_bit():
    got = {np.asarray(attend(*paged(n, fill), POSITIONS)).tobytes() for n, fill in ((6, 0.0), (8, np.nan), (16, 9.0))}
    assert len(got) == 1


def test_the_size_of_the_pages_changes_no_bit():
    """Smaller and larger than a block of 8, and neither a multiple of the other."""
    got = {np.asarray(attend(*paged(-(-24 // page), np.nan, page), POSITIONS)).tobytes() for page in (1, 2, 6, 8, 24)}
    assert len(got) == 1


def test_a_neighbour_that_sees_more_changes_no_bit():
    """Blocks that a token sees nothing of are exact no-ops."""
    pool, table = paged(6, np.nan)
    alone = np.asarray(attend(pool, table, np.array([0, 9, 0], np.int32)))[:2]
    beside = np.asarray(attend(pool, table, POSITIONS))[:2]
    assert alone.tobytes() == beside.tobytes()


def test_the_queries_of_a_chunk_each_see_the_keys_up_to_their_own():
    """Rows of five queries that end at POSITIONS, the first of them with one real query only; NaN beyond the ends."""
    chunk = 5
    q = RNG.standard_normal((TOKENS, chunk, GROUPS, HEADS, DIM)).astype(np.float32)
    length = np.minimum(chunk, POSITIONS + 1)
    start = POSITIONS + 1 - length
    positions = start[:, None] + np.arange(chunk, dtype=np.int32)
    pool, table = paged(7, np.nan)
    keys = KeyBlocks(jnp.asarray(pool), jnp.asarray(table), jnp.asarray(positions), jnp.asarray(start + length), SIZE)
    got = np.asarray(jax.jit(lambda q: keys.attend(q, split, 0.5))(q))
    for row in range(TOKENS):
        for i in range(length[row]):
            np.testing.assert_allclose(got[row, i], one(q[row, i], row, start[row] + i), atol=1e-6)


def test_padding_alone_is_finite():
    pool, table = paged(6, np.nan)
    none = jnp.zeros(TOKENS, jnp.int32)
    keys = KeyBlocks(jnp.asarray(pool), jnp.asarray(table), none[:, None], none, SIZE)
    assert np.isfinite(np.asarray(jax.jit(lambda q: keys.attend(q, split, 0.5))(Q[:, None]))).all()


@pytest.mark.parametrize("size", [1, 5, 8, 30])
@pytest.mark.parametrize("sinks", [0, 3, 9])
@pytest.mark.parametrize("block", [6, 16])
def test_a_window_shows_the_last_keys_and_the_sinks_whatever_lies_between(size, sinks, block):
    """Pages of positions that the first query does not see hold NaN, as if others had them."""
    chunk, window = 5, Window(size, sinks)
    q = RNG.standard_normal((TOKENS, chunk, GROUPS, HEADS, DIM)).astype(np.float32)
    length = np.minimum(chunk, POSITIONS + 1)
    start = POSITIONS + 1 - length
    positions = start[:, None] + np.arange(chunk, dtype=np.int32)
    pool, table = paged(7, np.nan)
    for row in range(TOKENS):
        for at in range(start[row]):
            if not (at > start[row] - size or at < sinks):
                pool[table[row, at // PAGE], :, at % PAGE] = np.nan
    keys = KeyBlocks(*map(jnp.asarray, (pool, table, positions, start + length)), block, window)
    got = np.asarray(jax.jit(lambda q: keys.attend(q, split, 0.5))(q))
    assert np.isfinite(got).all()  # padding too
    for row in range(TOKENS):
        for i in range(length[row]):
            np.testing.assert_allclose(got[row, i], one(q[row, i], row, start[row] + i, window), atol=1e-6)


@pytest.mark.parametrize("num_rows", [1, 2, 7, 16])
@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_rows_that_are_left_out_once_their_keys_are_through_lose_none_of_them(num_rows, chunk):
    """One row of 200 keys among short ones and one of padding alone, in tables of 1,200 positions."""
    rng = np.random.default_rng(num_rows)
    lengths = rng.integers(1, 70, num_rows).astype(np.int32)
    lengths[rng.integers(num_rows)] = 200
    content = rng.standard_normal((num_rows, 200, 2, GROUPS, DIM)).astype(np.float32)
    pages = np.full((1 + num_rows * 50, 2 * GROUPS, PAGE, DIM), np.nan, np.float32)
    table = np.zeros((num_rows, 300), np.int32)
    table[:, :50] = 1 + rng.permutation(num_rows * 50).reshape(num_rows, 50)
    for row in range(num_rows):
        for at in range(lengths[row]):
            pages[table[row, at // PAGE], :, at % PAGE] = content[row, at].reshape(-1, DIM)
    real = np.minimum(chunk, lengths)
    start = lengths - real
    real[1:2] = 0
    view = PageView(*map(jnp.asarray, (table, start[:, None] + np.arange(chunk, dtype=np.int32), real)))
    keys = KeyBlocks.of(jnp.asarray(pages), view, None)
    assert keys.narrows == (num_rows > 1)
    q = rng.standard_normal((num_rows, chunk, GROUPS, HEADS, DIM)).astype(np.float32)
    got = np.asarray(jax.jit(lambda q: keys.attend(q, split, 0.5))(q))
    assert np.isfinite(got).all()
    for row, i in np.argwhere(np.arange(chunk) < real[:, None]):
        seen = content[row, : start[row] + i + 1].astype(np.float64)
        for g, h in np.ndindex(GROUPS, HEADS):
            scores = seen[:, 0, g] @ q[row, i, g, h] * 0.5
            p = np.exp(scores - scores.max())
            np.testing.assert_allclose(got[row, i, g, h], (p / p.sum()) @ seen[:, 1, g], atol=1e-6)
