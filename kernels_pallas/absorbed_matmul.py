"""The two products of absorbed MLA with kv_b, whose rows are each head's keys, then its values.

DeepSeek-V2, arXiv:2405.04434 section 2.1.2. w [h, n + v, c], n and v a head's sizes of key and value, c of latents:
    to_latent:   q [..., h, n] -> [..., h, c],      y[h] = q[h] W_K[h],   W_K = w[:, :n]
    from_latent: mixed [..., h, c] -> [..., h, v],  y[h] = mixed[h] W_V[h]^T,   W_V = w[:, n:]
both in x's dtype. Forms:
- "split": with W_K and W_V cut out of w.
- "whole": with all of w, the query filled up with zeros, or the keys' part of the result left out. For few rows on a
  CPU, where XLA copies what it cuts out at every step: decode of 16 rows of 10 layers in 0.9 of the time.
"""

import math

import jax
import jax.numpy as jnp

from .dispatch import device_kind

MOST_ROWS = 64  # of "whole" on a CPU: for more rows the copy costs less than products with what nobody wants


def to_latent_reference(q: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.einsum("...hn,hnc->...hc", q, w[:, : q.shape[-1]])


def from_latent_reference(mixed: jax.Array, w: jax.Array, v_dim: int) -> jax.Array:
    return jnp.einsum("...hc,hvc->...hv", mixed, w[:, w.shape[1] - v_dim :])


def to_latent(q: jax.Array, w: jax.Array, *, impl: str = "auto") -> jax.Array:
    """Queries as what meets the latents themselves. `impl`: "auto", "split" or "whole"; else ValueError."""
    rows, n = _heads_first(q), q.shape[-1]
    if _takes_whole(q, impl):
        rows = jnp.pad(rows, ((0, 0), (0, 0), (0, w.shape[1] - n)))
    else:
        w = w[:, :n]
    return _heads_last(jnp.einsum("hmn,hnc->hmc", rows, w), q)


def from_latent(mixed: jax.Array, w: jax.Array, v_dim: int, *, impl: str = "auto") -> jax.Array:
    """Each head's value out of its mix of latents. `impl` as in `to_latent`."""
    if not _takes_whole(mixed, impl):
        w = w[:, w.shape[1] - v_dim :]
    both = jnp.einsum("hmc,hnc->hmn", _heads_first(mixed), w)
    return _heads_last(both[:, :, both.shape[2] - v_dim :], mixed)


def _heads_first(x: jax.Array) -> jax.Array:
    """[..., h, k] -> [h, rows, k]: asked for the other order, XLA's CPU product takes several times as long."""
    return x.reshape(-1, *x.shape[-2:]).swapaxes(0, 1)


def _heads_last(y: jax.Array, like: jax.Array) -> jax.Array:
    """[h, rows, k] -> [..., h, k] with the leading axes of `like`."""
    return y.swapaxes(0, 1).reshape(*like.shape[:-1], y.shape[2])


def _takes_whole(x: jax.Array, impl: str) -> bool:
    if impl not in ("auto", "split", "whole"):
        raise ValueError(f"impl is {impl!r}; it must be 'auto', 'split' or 'whole'")
    few = device_kind() == "cpu" and math.prod(x.shape[:-2]) <= MOST_ROWS
    return impl == "whole" or (impl == "auto" and few)
