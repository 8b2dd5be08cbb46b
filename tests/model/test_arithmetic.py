"""Tiles of fixed rows: the same numbers as the plain call, and the same bits at every number of rows."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from model.arithmetic import Arithmetic

FIXED = Arithmetic().fixed(tile_rows=4)
RNG = np.random.default_rng(0)
WEIGHT = jnp.asarray(RNG.standard_normal((512, 512), np.float32))  # large enough for the blocked form


def layer(x: jax.Array) -> dict[str, jax.Array]:
    """A product, a reduction and elementwise steps."""
    y = jax.nn.silu(x @ WEIGHT.T)
    return {"normed": y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6), "sum": y.sum(-1)}


def test_the_fast_arithmetic_calls_the_function_as_it_is():
    seen = []
    Arithmetic().rows(lambda a, b: seen.append((a, b)), 1, "b")
    assert seen == [(1, "b")]
    assert not Arithmetic().deterministic


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 11), st.integers(1, 5))
def test_rows_equal_the_function_on_all_rows(num_rows, size):
    x, y = np.arange(3.0 * num_rows).reshape(num_rows, 3), np.arange(num_rows)

    def pair(a, b):
        return a * 2 + b[:, None], b

    got = Arithmetic().fixed(tile_rows=size).rows(pair, jnp.asarray(x), jnp.asarray(y))
    np.testing.assert_array_equal(got[0], x * 2 + y[:, None])
    np.testing.assert_array_equal(got[1], y)


def test_a_row_has_the_same_bits_at_any_place_among_any_rows():
    row = RNG.standard_normal((512,)).astype(np.float32)
    run, bits = jax.jit(lambda x: FIXED.rows(layer, x)), set()
    for num_rows in (1, 3, 4, 9, 40):
        for place in {0, num_rows // 2, num_rows - 1}:
            x = RNG.standard_normal((num_rows, 512), np.float32)
            x[place] = row
            out = run(jnp.asarray(x))
            bits.add(np.asarray(out["normed"])[place].tobytes() + np.asarray(out["sum"])[place].tobytes())
    assert len(bits) == 1


@pytest.mark.parametrize("count", [0, 1, 4, 6, 10])
def test_rows_that_do_not_count_may_be_skipped(count):
    x = jnp.ones((10, 2))
    got = np.asarray(jax.jit(lambda n: FIXED.rows(lambda a: a + 1, x, count=n))(jnp.int32(count)))
    np.testing.assert_array_equal(got[:count], 2)
    np.testing.assert_array_equal(got[-(-count // 4) * 4 :], 0)


@pytest.mark.parametrize("num_rows", [1, 4, 5])
def test_the_loop_is_never_unrolled(num_rows):
    """Whatever the compiler knows of the number of rows, even with a count that is a constant."""
    for count in (None, 1):
        run = jax.jit(lambda x, n=count: FIXED.rows(layer, x, count=None if n is None else jnp.int32(n)))
        assert "while" in run.lower(jnp.ones((num_rows, 512))).compile().as_text()


def test_a_form_of_the_experts_that_was_chosen_stays():
    assert Arithmetic().fixed().moe_impl == "loop"
    assert Arithmetic("dense").fixed().moe_impl == "dense"
