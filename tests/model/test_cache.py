"""The paged pool against a dictionary."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.cache import PageView, init_cache, page_bytes, write
from model.config import ModelConfig
from model.key_blocks import KeyBlocks
from tests.model.shared import GOLDEN

PAGE, HEADS, WIDTH, ROWS, TOKENS = 4, 2, 3, 2, 5
TABLE = np.array([[3, 1, 5], [2, 6, 0]], np.int32)
write_jit = jax.jit(write)


def view(start, length):
    positions = np.asarray(start)[:, None] + np.arange(TOKENS)[None, :]
    return PageView(jnp.asarray(TABLE), jnp.asarray(positions, jnp.int32), jnp.asarray(length, jnp.int32))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, TOKENS), st.integers(0, TOKENS)), min_size=1, max_size=3))
def test_pages_hold_what_was_written_and_nothing_else_changes(chunks):
    pool = jnp.full((7, HEADS, PAGE, WIDTH), jnp.nan)  # an earlier owner left NaN everywhere
    capacity, at = (12, 8), [0, 0]
    kept = [[], []]
    rng = np.random.default_rng(0)
    for lengths in chunks:
        lengths = [min(n, cap - a) for n, cap, a in zip(lengths, capacity, at, strict=True)]
        values = rng.standard_normal((ROWS, TOKENS, HEADS * WIDTH)).astype(np.float32)
        where = view(at, lengths)
        pool = write_jit(pool, where, jnp.asarray(values))
        for row, n in enumerate(lengths):
            kept[row] += list(values[row, :n])
            at[row] += n
        want = np.full((7, HEADS, PAGE, WIDTH), np.nan, np.float32)
        for row, tokens in enumerate(kept):
            for position, token in enumerate(tokens):
                for head in range(HEADS):
                    want[TABLE[row, position // PAGE], head, position % PAGE] = token[head * WIDTH :][:WIDTH]
        np.testing.assert_array_equal(np.asarray(pool)[1:], want[1:])  # page 0 takes the padding


def test_mla_caches_the_latent_and_the_rotary_key_and_nothing_more():
    config = ModelConfig.load(GOLDEN / "v3")
    pools = init_cache(config, 3, PAGE, jnp.dtype(jnp.float32))
    assert [pool.shape for pool in pools] == [(3, 1, PAGE, 32 + 8)] * 4
    assert page_bytes(config, PAGE, jnp.dtype(jnp.bfloat16)) == 4 * PAGE * 40 * 2


def test_grouped_queries_cache_each_heads_keys_and_values():
    config = ModelConfig.load(GOLDEN / "r1_distill_qwen")
    heads, dim = config.layers[0].attention.num_kv_heads, config.layers[0].attention.head_dim
    pools = init_cache(config, 3, PAGE, jnp.dtype(jnp.float32))
    assert [pool.shape for pool in pools] == [(3, 2 * heads, PAGE, dim)] * len(config.layers)
    assert page_bytes(config, PAGE, jnp.dtype(jnp.float32)) == sum(pool.nbytes for pool in pools) // 3


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("tokens", [1, 3])
def test_writing_and_reading_copies_no_pool(heads, tokens):
    """A donated pool is written in place, whatever its number of heads: a copy would cost its whole size."""

    def step(pool, q, values):
        where = PageView(jnp.asarray(TABLE), jnp.zeros((2, tokens), jnp.int32), jnp.full(2, tokens, jnp.int32))
        pool = write(pool, where, values)
        out = KeyBlocks.of(pool, where, None).attend(q, lambda read: (read(0, 1), read(heads - 1, heads)), 1.0)
        return pool, out

    shapes = [(7, heads, PAGE, WIDTH), (2, tokens, 1, 2, WIDTH), (2, tokens, heads * WIDTH)]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    text = jax.jit(step, donate_argnums=0).lower(*arguments).compile().as_text()
    made = re.findall(r"= f32\[([\d,]+)\]\S* (?:copy|transpose|select)\(", text)
    assert not [dims for dims in made if math.prod(map(int, dims.split(","))) == math.prod(shapes[0])]


def test_one_token_of_one_head_is_written_alone():
    pool = jnp.zeros((7, 1, PAGE, WIDTH))
    where = PageView(jnp.asarray(TABLE[:1]), jnp.full((1, 1), 5, jnp.int32), jnp.ones(1, jnp.int32))
    got = np.asarray(write_jit(pool, where, jnp.ones((1, 1, WIDTH))))
    want = np.zeros((7, 1, PAGE, WIDTH))
    want[1, 0, 1] = 1
    np.testing.assert_array_equal(got, want)
