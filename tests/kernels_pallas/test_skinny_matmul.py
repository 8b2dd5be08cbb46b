"""The blocked product equals the plain one, in float64's eyes."""

import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.skinny_matmul import linear


@pytest.mark.parametrize("shape", [(2, 24), (3, 5, 24), (24,)])
@pytest.mark.parametrize("impl", ["reference", "blocked", "rows", "auto"])
def test_product_equals_float64(shape, impl):
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal(shape, np.float32), rng.standard_normal((128, 24), np.float32)
    got = linear(jnp.asarray(x), jnp.asarray(w), impl=impl)
    assert got.shape == (*shape[:-1], 128)
    np.testing.assert_allclose(got, x.astype(np.float64) @ w.T.astype(np.float64), rtol=1e-4, atol=1e-5)


def test_auto_takes_blocks_only_where_they_pay():
    rng = np.random.default_rng(0)
    for rows, out in ((1, 1024), (8, 1024), (200, 1024), (2, 64), (4, 64), (5, 64)):
        w = jnp.asarray(rng.standard_normal((out, 512), np.float32))
        x = jnp.asarray(rng.standard_normal((rows, 512), np.float32))
        np.testing.assert_allclose(linear(x, w), linear(x, w, impl="reference"), rtol=1e-4, atol=1e-3)


def test_an_unknown_form_is_refused():
    with pytest.raises(ValueError, match="blocked"):
        linear(jnp.zeros((1, 4)), jnp.zeros((4, 4)), impl="magic")
