"""Attention of single tokens over their paged keys, in blocks of a fixed number of positions from 0 on.

For the deterministic arithmetic: how wide a page table is, and how long the neighbours are, changes nothing, because a
block that a token sees nothing of leaves its sums as they are, to the bit. The running maximum and sum are those of
the online softmax (arXiv:1805.02867), float32.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .arithmetic import unknown
from .cache import Pool

Split = Callable[[Float[Array, "n s width"]], tuple[Float[Array, "n s g k"], Float[Array, "n s g v"]]]


class KeyBlocks(NamedTuple):
    """Where the keys of n tokens are. Token i sees positions up to positions[i] of its own pages."""

    pool: Pool
    page_table: Int[Array, "n pages"]
    positions: Int[Array, " n"]
    size: int  # positions in a block

    def attend(self, q: Float[Array, "n g j k"], split: Split, scale: float) -> Float[Array, "n g j v"]:
        """Each group's j heads share keys and values, which `split` takes out of what the cache holds."""

        def add(index: jax.Array, sums: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
            top, mass, mixed = sums
            at = index * self.size + jnp.arange(self.size)
            visible = at[None, :] <= self.positions[:, None]  # [n, s]
            keys, values = split(jnp.where(visible[..., None], self._read(at), 0).astype(q.dtype))
            scores = jnp.einsum("ngjk,nsgk->ngjs", q, keys, preferred_element_type=jnp.float32) * scale
            scores = jnp.where(visible[:, None, None, :], scores, -jnp.inf)
            new_top = jnp.maximum(top, scores.max(-1))  # position 0 is visible to all: finite from the first block on
            p, shrink = jnp.exp(scores - new_top[..., None]), jnp.exp(top - new_top)
            new = jnp.einsum("ngjs,nsgv->ngjv", p.astype(q.dtype), values, preferred_element_type=jnp.float32)
            return new_top, mass * shrink + p.sum(-1), mixed * shrink[..., None] + new

        heads = q.shape[:-1]
        width = jax.eval_shape(lambda: split(self._read(jnp.arange(self.size)))[1]).shape[-1]
        start = (jnp.full(heads, -jnp.inf), jnp.zeros(heads), jnp.zeros((*heads, width)))
        num_blocks = unknown(self.positions.max() // self.size + 1)
        _, mass, mixed = jax.lax.fori_loop(0, num_blocks, add, start)
        return (mixed / mass[..., None]).astype(q.dtype)

    def _read(self, at: Int[Array, " s"]) -> Float[Array, "n s width"]:
        """What the cache holds at some positions of every token's pages; anything at all where there is no page."""
        _, page_size, width = self.pool.shape
        page = self.page_table[:, jnp.minimum(at // page_size, self.page_table.shape[1] - 1)]
        return self.pool.reshape(-1, width)[page * page_size + at % page_size]
