"""Softmax in every form against float64, over lengths, dtypes, masks and rows of nothing; and its gradient."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas.softmax import softmax, softmax_reference
from tests.kernels_pallas.compare import assert_close

pytestmark = pytest.mark.usefixtures("quick_compile")

ROUNDING = {"float32": 3e-6, "bfloat16": 2**-8, "float16": 2**-10}


def rows64(x, seen, dy):
    """The result and the gradient of x, row by row."""
    y, dx = np.zeros(x.shape), np.zeros(x.shape)
    for at in np.ndindex(x.shape[:-1]):
        which = np.flatnonzero(seen[at] & (x[at] != -np.inf))
        if which.size:
            weights = np.exp(x[at][which] - x[at][which].max())
            y[at][which] = weights / weights.sum()
            dx[at][which] = y[at][which] * (dy[at][which] - y[at][which] @ dy[at][which])
    return y, dx


@partial(jax.jit, static_argnames="impl")
def forward_and_back(x, mask, dy, impl):
    y, pull_back = jax.vjp(lambda x: softmax(x, mask, impl=impl), x)
    return y, *pull_back(dy), softmax_reference(x, mask)


def check(impl, x, mask, dtype, seed=0):
    x = jnp.asarray(x, dtype)
    dy = jnp.asarray(np.random.default_rng(seed).standard_normal(x.shape), dtype)
    seen = np.ones(x.shape, bool) if mask is None else np.broadcast_to(mask, x.shape)
    want, want_dx = rows64(np.asarray(x, np.float64), seen, np.asarray(dy, np.float64))
    mask = None if mask is None else jnp.asarray(mask)
    # What is masked must not matter, in x or in the gradient of y.
    x, dy = (jnp.where(seen, a, jnp.nan) for a in (x, dy))
    y, dx, reference = forward_and_back(x, mask, dy, impl)
    assert y.dtype == dx.dtype == x.dtype
    tolerance = ROUNDING[np.dtype(dtype).name]
    for got in (y, reference):
        assert_close(got, want, absolute=1e-7, relative=tolerance)
    assert_close(dx, want_dx, absolute=4 * tolerance * np.abs(want).max(), relative=4 * tolerance, cosine=1e-4)
    assert not np.asarray(y, np.float32)[want == 0].any()
    return y


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("impl", ["xla", "interpret"])
def test_short_rows_equal_float64(impl, dtype):
    x = np.random.default_rng(0).normal(0, 3, (3, 2, 5, 37))
    x[1, 0, 2, 5:20] = x[2, 1, 1] = x[0, 0, 0, 1:] = -np.inf
    check(impl, x, None, dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("impl", ["xla", "interpret"])
def test_long_rows_equal_float64_wherever_their_top_is(impl, dtype):
    x = np.random.default_rng(1).normal(0, 3, (3, 9001))
    x[0, 0], x[1, 9000] = 30, 30
    x[2, :8500] = -np.inf
    check(impl, x, None, dtype)


@pytest.mark.parametrize("shape", [(3, 2, 5, 37), (3, 1, 5, 37), (5, 1), (1, 2, 1, 37), (37,)])
@pytest.mark.parametrize("impl", ["xla", "interpret"])
def test_masks_of_every_shape_that_broadcasts(impl, shape):
    rng = np.random.default_rng(2)
    mask = rng.random(shape) < 0.6
    mask[..., 0] &= rng.random(shape[:-1]) < 0.6
    check(impl, rng.normal(0, 3, (3, 2, 5, 37)), mask, jnp.float32)


@pytest.mark.parametrize("impl", ["xla", "interpret"])
def test_a_row_of_nothing_is_zeros_and_has_no_gradient(impl):
    y = check(impl, np.full((2, 37), -np.inf), None, jnp.bfloat16)
    assert not np.asarray(y, np.float32).any()
    check(impl, np.zeros((2, 37)), np.zeros((2, 37), bool), jnp.bfloat16)


@settings(max_examples=25, deadline=None)
@given(st.data())
@pytest.mark.parametrize("impl", ["xla", "interpret"])
def test_logits_of_any_size_sum_to_one_and_keep_their_order(impl, data):
    numbers = st.one_of(st.floats(-6e4, 6e4, width=16), st.just(-np.inf), st.just(6e4))
    x = np.array(data.draw(st.lists(numbers, min_size=37, max_size=37)), np.float32)[None]
    y = np.asarray(check(impl, x, None, jnp.float16), np.float64)
    assert abs(y.sum() - (x > -np.inf).any()) < 0.02
    assert (np.diff(y[0, np.argsort(x[0])]) >= 0).all()


def test_bad_arguments_are_refused():
    x = jnp.zeros((2, 3))
    with pytest.raises(ValueError, match="interpret"):
        softmax(x, impl="cuda")
    for shape in ((4,), (1, 2, 3), (3, 3)):
        with pytest.raises(ValueError, match="broadcast"):
            softmax(x, jnp.ones(shape, bool))
