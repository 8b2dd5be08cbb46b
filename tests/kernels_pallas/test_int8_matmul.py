"""The product with 8-bit weights, forward and back, against a float64 loop over outputs with every number scaled."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas.int8_matmul import int8_matmul, int8_matmul_reference

from .compare import assert_close

pytestmark = pytest.mark.usefixtures("quick_compile")

INT8, FP8 = np.dtype(np.int8), np.dtype(ml_dtypes.float8_e4m3fn)
CHANNELS = None  # of W, with a scale each, in place of a block
TOLERANCE = {
    jnp.float32: {"absolute": 1e-4, "relative": 1e-5, "cosine": 1e-9},
    jnp.float16: {"absolute": 0.02, "relative": 2e-3, "cosine": 1e-5},
    jnp.bfloat16: {"absolute": 0.1, "relative": 0.01, "cosine": 1e-4},
}
each_impl = pytest.mark.parametrize("impl", ["reference", "xla", "interpret"])


@partial(jax.jit, static_argnames=("impl", "block"))
def run(x: jax.Array, w: jax.Array, scale: jax.Array, *, impl: str, block: tuple[int, int] | None) -> jax.Array:
    form = int8_matmul_reference if impl == "reference" else partial(int8_matmul, impl=impl)
    return form(x, w, scale) if block is None else form(x, w, scale, block=block)


def case(
    rows: tuple[int, ...], out: int, ins: int, weights: np.dtype, block: tuple[int, int] | None, dtype: Any
) -> tuple[jax.Array, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(out)
    x = jnp.asarray(rng.standard_normal((*rows, ins)), dtype)
    w = rng.integers(-127, 128, (out, ins)) if weights == INT8 else rng.standard_normal((out, ins)) * 50
    blocks = (out,) if block is None else (-(-out // block[0]), -(-ins // block[1]))
    return x, w.astype(weights), rng.uniform(0.5, 2, blocks).astype(np.float32) / 1000


def scaled(w: np.ndarray, scale: np.ndarray, block: tuple[int, int] | None) -> np.ndarray:
    """W as it is meant, block by block."""
    wide, (bn, bk) = w.astype(np.float64), block or (1, w.shape[1])
    for (n, k), number in np.ndenumerate(scale.reshape(len(scale), -1)):
        wide[n * bn : (n + 1) * bn, k * bk : (k + 1) * bk] *= number
    return wide


@each_impl
@pytest.mark.parametrize(
    ("rows", "out", "ins", "weights", "block", "dtype"),
    [
        ((1,), 70, 100, INT8, CHANNELS, jnp.bfloat16),
        ((3, 5), 64, 1024, INT8, CHANNELS, jnp.float32),  # split over `in`
        ((140,), 37, 33, INT8, CHANNELS, jnp.float16),
        ((2,), 260, 300, FP8, (128, 128), jnp.bfloat16),
        ((130,), 50, 1300, FP8, (32, 256), jnp.float32),
        ((4,), 75, 90, INT8, (20, 40), jnp.bfloat16),
        ((), 8, 16, FP8, CHANNELS, jnp.float16),
    ],
)
def test_product_equals_float64(rows, out, ins, weights, block, dtype, impl) -> None:
    x, w, scale = case(rows, out, ins, weights, block, dtype)
    y = run(x, jnp.asarray(w), jnp.asarray(scale), impl=impl, block=block)
    assert y.dtype == dtype
    assert_close(y, np.asarray(x, np.float64) @ scaled(w, scale, block).T, **TOLERANCE[dtype])


@each_impl
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_every_number_that_8_bits_have_is_exact(dtype, impl) -> None:
    bits = np.arange(256, dtype=np.uint8)
    for numbers in (bits.view(np.int8), bits[bits % 128 < 127].view(FP8)):
        w, scale = numbers[:, None], np.ones(len(numbers), np.float32)
        np.testing.assert_array_equal(run(jnp.ones((1, 1), dtype), w, scale, impl=impl, block=CHANNELS)[0], numbers)


@settings(deadline=None, max_examples=30, derandomize=True)
@given(seed=st.integers(0, 1000), magnitude=st.integers(-20, 20), hole=st.integers(0, 4))
def test_any_values(seed, magnitude, hole) -> None:
    """Scales of any size, rows of zeros, and one that is not finite, which harms nobody else."""
    rng = np.random.default_rng(seed)
    x, w, scale = case((5,), 75, 90, INT8, (20, 40), jnp.float32)
    w, scale = rng.permutation(w), (scale * 2.0**magnitude).astype(np.float32)
    want = np.asarray(x, np.float64) @ scaled(w, scale, (20, 40)).T
    others = np.arange(5) != hole
    for impl in ("xla", "interpret"):
        y = np.asarray(run(x.at[hole].set(jnp.nan), w, scale, impl=impl, block=(20, 40)))
        assert np.isnan(y[hole]).all()
        assert_close(y[others] / 2.0**magnitude, want[others] / 2.0**magnitude, **TOLERANCE[jnp.float32])


@pytest.mark.parametrize("impl", ["xla", "interpret"])
@pytest.mark.parametrize(
    ("out", "weights", "block", "dtype"),
    [
        (75, INT8, CHANNELS, jnp.float32),
        (75, FP8, (32, 24), jnp.bfloat16),
        (300, INT8, CHANNELS, jnp.float32),  # more than a chunk of XLA's
        (300, FP8, (128, 128), jnp.float32),
    ],
)
def test_gradient_reaches_x_alone(out, weights, block, dtype, impl) -> None:
    x, w, scale = case((2, 3), out, 1000, weights, block, dtype)
    g = jnp.asarray(np.random.default_rng(1).standard_normal((2, 3, out)), dtype)
    y, pull = jax.vjp(partial(run, impl=impl, block=block), x, jnp.asarray(w), jnp.asarray(scale))
    dx, dw, dscale = pull(g)
    wide = scaled(w, scale, block)
    assert_close(y, np.asarray(x, np.float64) @ wide.T, **TOLERANCE[dtype])
    assert dx.dtype == dtype
    assert_close(dx, np.asarray(g, np.float64) @ wide, **TOLERANCE[dtype])
    assert dw.dtype == jax.dtypes.float0 if weights == INT8 else not np.asarray(dw).any()
    assert not np.asarray(dscale).any()


def test_xla_never_has_all_of_w_widened() -> None:
    x, w, scale = jnp.zeros((2, 1024)), jnp.zeros((4096, 1024), jnp.int8), jnp.zeros((4096,))
    compiled = jax.jit(partial(int8_matmul, impl="xla")).lower(x, w, scale).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < w.size


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"impl": "magic"}, "'pallas' or 'interpret'"),
        ({"w": jnp.zeros((8, 16), jnp.uint8)}, "W is uint8"),
        ({"x": jnp.zeros((2, 15))}, r"\[..., in\] and \[out, in\]"),
        ({"scale": jnp.ones((7,))}, r"scale is \(7,\)"),
        ({"scale": jnp.ones((1, 2))}, r"or \(1, 1\) for blocks of \(128, 128\)"),
        ({"block": (0, 8)}, "at least 1"),
    ],
)
def test_a_bad_argument_is_refused(change, message) -> None:
    arguments = {"x": jnp.zeros((2, 16)), "w": jnp.zeros((8, 16), jnp.int8), "scale": jnp.ones((8,))} | change
    with pytest.raises(ValueError, match=message):
        int8_matmul(**arguments)
