"""y = x W^T with W [out, in] as checkpoints store it, in the form that the device does best at x's row count.

x [..., in], W [out, in] -> y [..., out] in x's dtype, accumulated in float32. Few rows on a CPU take the blocked form,
everything else the plain product.
"""

import math

import jax
import jax.numpy as jnp

from .blocked import blocked_product, prefers_blocks


def linear_reference(x: jax.Array, w: jax.Array) -> jax.Array:
    y = jax.lax.dot_general(x, w, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return y.astype(x.dtype)


def _blocked(x: jax.Array, w: jax.Array) -> jax.Array:
    y = blocked_product(x.reshape(-1, x.shape[-1]), w)
    return y.reshape(*x.shape[:-1], w.shape[0]).astype(x.dtype)


def linear(x: jax.Array, w: jax.Array, *, impl: str = "auto") -> jax.Array:
    """`impl`: "auto", "reference" or "blocked". Raises ValueError for another name."""
    if impl == "auto":
        impl = "blocked" if prefers_blocks(math.prod(x.shape[:-1]), w) else "reference"
    if impl == "blocked":
        return _blocked(x, w)
    if impl == "reference":
        return linear_reference(x, w)
    raise ValueError(f"impl is {impl!r}; it must be 'auto', 'reference' or 'blocked'")
