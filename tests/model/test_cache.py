"""The paged pool against a dictionary."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from model.cache import PageView, causal_mask, init_cache, page_bytes, read, write
from model.config import ModelConfig
from tests.model.shared import GOLDEN

PAGE, WIDTH, ROWS, TOKENS = 4, 3, 2, 5
TABLE = np.array([[3, 1, 5], [2, 6, 0]], np.int32)
write_jit, read_jit = jax.jit(write), jax.jit(read)


def view(start, length):
    positions = np.asarray(start)[:, None] + np.arange(TOKENS)[None, :]
    return PageView(jnp.asarray(TABLE), jnp.asarray(positions, jnp.int32), jnp.asarray(length, jnp.int32))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, TOKENS), st.integers(0, TOKENS)), min_size=1, max_size=3))
def test_reads_give_back_what_was_written(chunks):
    pool = jnp.full((7, PAGE, WIDTH), jnp.nan)  # an earlier owner left NaN everywhere
    capacity, at = (12, 8), [0, 0]
    kept = [[], []]
    rng = np.random.default_rng(0)
    for lengths in chunks:
        lengths = [min(n, cap - a) for n, cap, a in zip(lengths, capacity, at, strict=True)]
        values = rng.standard_normal((ROWS, TOKENS, WIDTH)).astype(np.float32)
        where = view(at, lengths)
        pool = write_jit(pool, where, jnp.asarray(values))
        for row, n in enumerate(lengths):
            kept[row] += list(values[row, :n])
            at[row] += n
        got = np.asarray(read_jit(pool, where))
        for row in range(ROWS):
            want = np.zeros((12, WIDTH), np.float32)
            if kept[row]:
                want[: len(kept[row])] = kept[row]
            np.testing.assert_array_equal(got[row], want)


def test_causal_mask():
    mask = np.asarray(causal_mask(jnp.array([[0, 1], [3, 4]]), 5))
    np.testing.assert_array_equal(mask[1], [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    np.testing.assert_array_equal(mask[0], [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0]])


def test_mla_caches_the_latent_and_the_rotary_key_and_nothing_more():
    config = ModelConfig.load(GOLDEN / "v3")
    pools = init_cache(config, 3, PAGE, jnp.dtype(jnp.float32))
    assert [pool.shape for pool in pools] == [(3, PAGE, 32 + 8)] * 4
    assert page_bytes(config, PAGE, jnp.dtype(jnp.bfloat16)) == 4 * PAGE * 40 * 2
