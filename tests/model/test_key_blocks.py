"""Attention in blocks of keys, against float64 over the whole row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.key_blocks import KeyBlocks

TOKENS, GROUPS, HEADS, DIM, PAGE, SIZE = 3, 2, 2, 4, 4, 8
RNG = np.random.default_rng(0)
POSITIONS = np.array([0, 9, 21], np.int32)
Q = RNG.standard_normal((TOKENS, GROUPS, HEADS, DIM), np.float32)
CONTENT = RNG.standard_normal((TOKENS, 24, 2, GROUPS, DIM)).astype(np.float32)  # keys and values by position


def split(kv):
    kv = kv.reshape(*kv.shape[:2], 2, GROUPS, DIM)
    return kv[:, :, 0], kv[:, :, 1]


def paged(num_pages: int, fill: float) -> tuple[np.ndarray, np.ndarray]:
    """A pool whose pages lie in any order and hold `fill` beyond each token's position, and a table of that width."""
    pool = np.full((1 + TOKENS * num_pages, PAGE, 2 * GROUPS * DIM), fill, np.float32)
    table = 1 + RNG.permutation(TOKENS * num_pages).astype(np.int32).reshape(TOKENS, num_pages)
    for token, position in enumerate(POSITIONS):
        for at in range(position + 1):
            pool[table[token, at // PAGE], at % PAGE] = CONTENT[token, at].reshape(-1)
    return pool, table


@jax.jit
def attend(pool, table, positions):
    return KeyBlocks(pool, table, positions, SIZE).attend(jnp.asarray(Q), split, 0.5)


def reference() -> np.ndarray:
    out = np.zeros((TOKENS, GROUPS, HEADS, DIM))
    for token, position in enumerate(POSITIONS):
        seen = CONTENT[token, : position + 1].astype(np.float64)
        for g in range(GROUPS):
            scores = Q[token, g].astype(np.float64) @ seen[:, 0, g].T * 0.5
            p = np.exp(scores - scores.max(-1, keepdims=True))
            out[token, g] = (p / p.sum(-1, keepdims=True)) @ seen[:, 1, g]
    return out


@pytest.mark.parametrize("num_pages", [6, 7, 11])
def test_equals_the_softmax_over_all_keys(num_pages):
    got = attend(*paged(num_pages, 0.0), POSITIONS)
    np.testing.assert_allclose(got, reference(), atol=1e-6)


def test_width_of_the_table_and_what_pages_held_before_change_no_bit():
    got = {np.asarray(attend(*paged(n, fill), POSITIONS)).tobytes() for n, fill in ((6, 0.0), (8, np.nan), (16, 9.0))}
    assert len(got) == 1


def test_a_neighbour_that_sees_more_changes_no_bit():
    """Blocks that a token sees nothing of are exact no-ops."""
    pool, table = paged(6, np.nan)
    alone = np.asarray(attend(pool, table, np.array([0, 9, 0], np.int32)))[:2]
    beside = np.asarray(attend(pool, table, POSITIONS))[:2]
    assert alone.tobytes() == beside.tobytes()
