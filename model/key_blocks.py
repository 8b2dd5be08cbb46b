"""Attention of a step's queries over their paged keys, in blocks of a fixed number of positions from 0 on.

The walk ends at the longest row's last key, so that a wide page table costs nothing and no row's keys are ever all in
memory at once. The running maximum and sum are those of the online softmax (arXiv:1805.02867), float32. A block that a
query sees nothing of leaves its sums as they are, to the bit: for the deterministic arithmetic, how wide a page table
is, and how long the neighbours are, changes nothing.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .arithmetic import unknown
from .cache import PageView, Pool

Split = Callable[[Float[Array, "n s width"]], tuple[Float[Array, "n s g k"], Float[Array, "n s g v"]]]

# Keys at a time, as measured on CPU: for a few queries a block that stays in cache, for a chunk one whose products are
# worth starting.
FEW, FEW_BLOCK, CHUNK_BLOCK = 16, 16, 128


class KeyBlocks(NamedTuple):
    """Where the keys of n rows of t queries are. Query i of row r sees positions up to positions[r, i]; end[r] is the
    first position of row r that holds nothing."""

    pool: Pool
    page_table: Int[Array, "n pages"]
    positions: Int[Array, "n t"]
    end: Int[Array, " n"]
    size: int  # positions in a block

    @classmethod
    def of(cls, pool: Pool, view: PageView) -> "KeyBlocks":
        """For a step whose tokens are written."""
        size = FEW_BLOCK if view.positions.shape[1] < FEW else CHUNK_BLOCK
        return cls(pool, view.page_table, view.positions, view.positions[:, 0] + view.length, size)

    def attend(self, q: Float[Array, "n t g j k"], split: Split, scale: float) -> Float[Array, "n t g j v"]:
        """Each group's j heads share keys and values, which `split` takes out of what the cache holds."""
        n, t, g, j, k = q.shape
        queries = q.transpose(0, 2, 1, 3, 4).reshape(n, g, t * j, k)
        last_key = jnp.repeat(self.positions, j, axis=1)[:, :, None]  # [n, t * j, 1]

        def add(index: jax.Array, sums: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
            top, mass, mixed = sums
            at = index * self.size + jnp.arange(self.size)
            # Masked keys have probability 0, and 0 * NaN left in a page by an earlier owner is NaN: hence the zeros.
            kept = jnp.where((at < self.end[:, None])[..., None], self._read(at), 0)
            keys, values = split(kept.astype(q.dtype))
            scores = jnp.einsum("ngmk,nsgk->ngms", queries, keys, preferred_element_type=jnp.float32) * scale
            scores = jnp.where((at <= last_key)[:, None], scores, -jnp.inf)
            new_top = jnp.maximum(top, scores.max(-1))  # position 0 is visible to all: finite from the first block on
            p, shrink = jnp.exp(scores - new_top[..., None]), jnp.exp(top - new_top)
            new = jnp.einsum("ngms,nsgv->ngmv", p.astype(q.dtype), values, preferred_element_type=jnp.float32)
            return new_top, mass * shrink + p.sum(-1), mixed * shrink[..., None] + new

        heads = queries.shape[:-1]
        width = jax.eval_shape(lambda: split(self._read(jnp.arange(self.size)).astype(q.dtype))[1]).shape[-1]
        start = (jnp.full(heads, -jnp.inf), jnp.zeros(heads), jnp.zeros((*heads, width)))
        num_blocks = unknown(jnp.maximum(-(-self.end.max() // self.size), 1))
        _, mass, mixed = jax.lax.fori_loop(0, num_blocks, add, start)
        out = (mixed / mass[..., None]).astype(q.dtype)
        return out.reshape(n, g, t, j, width).transpose(0, 2, 1, 3, 4)

    def _read(self, at: Int[Array, " s"]) -> Float[Array, "n s width"]:
        """What the cache holds at some positions of every row's pages; anything at all where there is no page."""
        _, page_size, width = self.pool.shape
        page = self.page_table[:, jnp.minimum(at // page_size, self.page_table.shape[1] - 1)]
        return self.pool.reshape(-1, width)[page * page_size + at % page_size]
