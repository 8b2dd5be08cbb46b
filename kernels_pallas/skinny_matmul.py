"""y = x W^T with W [out, in] as checkpoints store it, in the form that the device does best at x's row count.

x [..., in], W [out, in] -> y [..., out] in x's dtype, accumulated in float32. Few rows on a CPU take the blocked form,
very few with a W that stays in cache go one by one, everything else is the plain product.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from .blocked import blocked_product, prefers_blocks, prefers_single_rows, row_by_row


def linear_reference(x: jax.Array, w: jax.Array) -> jax.Array:
    y = jax.lax.dot_general(x, w, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return y.astype(x.dtype)


def _few(x: jax.Array, w: jax.Array, product: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
    y = product(x.reshape(-1, x.shape[-1]), w)
    return y.reshape(*x.shape[:-1], w.shape[0]).astype(x.dtype)


def linear(x: jax.Array, w: jax.Array, *, impl: str = "auto") -> jax.Array:
    """`impl`: "auto", "reference", "blocked" or "rows". Raises ValueError for another name."""
    if impl == "auto":
        impl = _choose(math.prod(x.shape[:-1]), w)
    if impl == "blocked":
        return _few(x, w, blocked_product)
    if impl == "rows":
        return _few(x, w, row_by_row)
    if impl == "reference":
        return linear_reference(x, w)
    raise ValueError(f"impl is {impl!r}; it must be 'auto', 'reference', 'blocked' or 'rows'")


def _choose(num_rows: int, w: jax.Array) -> str:
    if prefers_single_rows(num_rows, w):
        return "rows"
    return "blocked" if prefers_blocks(num_rows, w) else "reference"
