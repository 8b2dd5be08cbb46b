"""The product forms that several ops share on a CPU: x W^T with W cut into blocks of output rows, or row by row of x.

XLA's CPU product is far from memory bandwidth for 2 to 64 rows. As a batched product over blocks ("mk,gnk->gmn") it
reaches it; cutting W [out, in] is a free reshape. One row and many rows are better served by the plain product, and so
are a few rows one after the other where W stays in cache: two rows in a third of the time for 640 x 256.
"""

import jax
import jax.numpy as jnp

from .dispatch import device_kind

NUM_BLOCKS = 32
MIN_SIZE = 1 << 18  # below this a weight sits in cache, and the transpose costs more than it saves
MAX_ROWS = 64
FEW_ROWS, TINY_SIZE = 4, 1 << 13  # up to so many rows go one by one, unless W is smaller still


def blocked_product(x: jax.Array, w: jax.Array) -> jax.Array:
    """x [m, in], w [out, in] -> [m, out] f32. `out` must be a multiple of NUM_BLOCKS."""
    blocks = w.reshape(NUM_BLOCKS, -1, w.shape[1])  # [g, out/g, in]
    y = jnp.einsum("mk,gnk->gmn", x, blocks, preferred_element_type=jnp.float32)
    return y.transpose(1, 0, 2).reshape(x.shape[0], w.shape[0])


def row_by_row(x: jax.Array, w: jax.Array) -> jax.Array:
    """x [m, in], w [out, in] -> [m, out] f32."""

    def one(row: jax.Array) -> jax.Array:
        return jax.lax.dot_general(row, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)

    return jnp.concatenate([one(x[i : i + 1]) for i in range(x.shape[0])])


def prefers_single_rows(num_rows: int, w: jax.Array) -> bool:
    """Whether `row_by_row` is the fastest form for `num_rows` rows, on this device."""
    fits = TINY_SIZE <= w.size < MIN_SIZE and w.dtype == jnp.float32
    return fits and 2 <= num_rows <= FEW_ROWS and device_kind() == "cpu"


def prefers_blocks(num_rows: int, w: jax.Array) -> bool:
    """Whether the blocked form is the faster one for `num_rows` rows, on this device."""
    fits = w.shape[0] % NUM_BLOCKS == 0 and w.size >= MIN_SIZE and w.dtype == jnp.float32
    return fits and 2 <= num_rows <= MAX_ROWS and device_kind() == "cpu"
