"""y = x W^T with W [out, in] as checkpoints store it, in the form that the device does best at x's row count.

x [..., in], W [out, in] -> y [..., out] in x's dtype, accumulated in float32. On a CPU, XLA's product is far from
memory bandwidth for 2 to 64 rows; split into blocks of output rows ("mk,gnk->gmn", a free reshape of W) it reaches it.
One row, many rows, and every other device use the plain product.
"""

import math

import jax
import jax.numpy as jnp

from .dispatch import device_kind

NUM_BLOCKS = 64
MIN_BLOCKED_SIZE = 1 << 18  # below this a weight sits in cache, and the transpose costs more than it saves


def linear_reference(x: jax.Array, w: jax.Array) -> jax.Array:
    y = jax.lax.dot_general(x, w, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return y.astype(x.dtype)


def _blocked(x: jax.Array, w: jax.Array) -> jax.Array:
    rows = x.reshape(-1, x.shape[-1])  # [m, in]
    blocks = w.reshape(NUM_BLOCKS, -1, w.shape[1])  # [g, out/g, in]
    y = jnp.einsum("mk,gnk->gmn", rows, blocks, preferred_element_type=jnp.float32)
    return y.transpose(1, 0, 2).reshape(*x.shape[:-1], w.shape[0]).astype(x.dtype)


def linear(x: jax.Array, w: jax.Array, *, impl: str = "auto") -> jax.Array:
    """`impl`: "auto", "reference" or "blocked". Raises ValueError for another name."""
    if impl == "auto":
        impl = "blocked" if _prefers_blocks(math.prod(x.shape[:-1]), w) else "reference"
    if impl == "blocked":
        return _blocked(x, w)
    if impl == "reference":
        return linear_reference(x, w)
    raise ValueError(f"impl is {impl!r}; it must be 'auto', 'reference' or 'blocked'")


def _prefers_blocks(rows: int, w: jax.Array) -> bool:
    fits = w.shape[0] % NUM_BLOCKS == 0 and w.size >= MIN_BLOCKED_SIZE
    return fits and 2 <= rows <= 64 and w.dtype == jnp.float32 and device_kind() == "cpu"
