"""Both forms of kv_b's products equal float64's loops over heads, with the halves cut out."""

import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.absorbed_matmul import from_latent, from_latent_reference, to_latent, to_latent_reference

HEADS, N, V, C = 3, 6, 4, 10


@pytest.mark.parametrize("lead", [(2,), (3, 1), (70,)])
@pytest.mark.parametrize("impl", ["auto", "split", "whole"])
def test_products_equal_float64(lead: tuple[int, ...], impl: str) -> None:
    rng = np.random.default_rng(0)
    w = rng.standard_normal((HEADS, N + V, C), np.float32)
    q, mixed = (rng.standard_normal((*lead, HEADS, size), np.float32) for size in (N, C))
    latent, value = np.zeros((*lead, HEADS, C)), np.zeros((*lead, HEADS, V))
    for h in range(HEADS):
        latent[..., h, :] = q[..., h, :].astype(np.float64) @ w[h, :N]
        value[..., h, :] = mixed[..., h, :].astype(np.float64) @ w[h, N:].T
    xs = [jnp.asarray(x) for x in (q, mixed, w)]
    for got in (to_latent(xs[0], xs[2], impl=impl), to_latent_reference(xs[0], xs[2])):
        np.testing.assert_allclose(got, latent, rtol=1e-4, atol=1e-5)
    for got in (from_latent(xs[1], xs[2], V, impl=impl), from_latent_reference(xs[1], xs[2], V)):
        np.testing.assert_allclose(got, value, rtol=1e-4, atol=1e-5)


def test_an_unknown_form_is_refused() -> None:
    w = jnp.zeros((HEADS, N + V, C))
    with pytest.raises(ValueError, match="whole"):
        to_latent(jnp.zeros((1, HEADS, N)), w, impl="magic")
    with pytest.raises(ValueError, match="whole"):
        from_latent(jnp.zeros((1, HEADS, C)), w, V, impl="magic")
