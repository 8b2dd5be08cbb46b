"""Attention of a step's queries over their paged keys, in blocks of a fixed number of positions from 0 on.

The walk ends at the longest row's last key, so that a wide page table costs nothing and no row's keys are ever all in
memory at once. With a window it goes from the sinks to the block of each row's first visible key: what pages hold in
between is never used, and may be another position's. Every block begins at a multiple of its size, so that it can be
read in whole pages, or in the whole parts that pages and blocks share. The running maximum and sum are those of the
online softmax (arXiv:1805.02867), float32. A block that a query sees nothing of leaves its sums as they are, to the
bit: for the deterministic arithmetic, how wide a page table is, how large its pages are, and how long the neighbours
are, changes nothing.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .architecture import Window
from .arithmetic import unknown
from .cache import PageView, Pool

Split = Callable[[Float[Array, "n s width"]], tuple[Float[Array, "n s g k"], Float[Array, "n s g v"]]]

# Keys at a time, as measured on CPU: for a few queries a block that stays in cache, for a chunk one whose products are
# worth starting. Chunks of several rows are mostly short prompts, which a large block would exceed; a row of its own is
# more often far behind in a long one.
FEW, FEW_BLOCK, CHUNK_BLOCK, LONE_CHUNK_BLOCK = 16, 16, 64, 128


class KeyBlocks(NamedTuple):
    """Where the keys of n rows of t queries are. Query i of row r sees positions up to positions[r, i]; end[r] is the
    first position of row r that holds nothing."""

    pool: Pool
    page_table: Int[Array, "n pages"]
    positions: Int[Array, "n t"]
    end: Int[Array, " n"]
    size: int  # positions in a block
    window: Window | None = None

    @classmethod
    def of(cls, pool: Pool, view: PageView, window: Window | None) -> "KeyBlocks":
        """For a step whose tokens are written."""
        n, t = view.positions.shape
        size = FEW_BLOCK if t < FEW else LONE_CHUNK_BLOCK if n == 1 else CHUNK_BLOCK
        return cls(pool, view.page_table, view.positions, view.positions[:, 0] + view.length, size, window)

    def attend(self, q: Float[Array, "n t g j k"], split: Split, scale: float) -> Float[Array, "n t g j v"]:
        """Each group's j heads share keys and values, which `split` takes out of what the cache holds."""
        n, t, g, j, k = q.shape
        queries = q.transpose(0, 2, 1, 3, 4).reshape(n, g, t * j, k)
        last_key = jnp.repeat(self.positions, j, axis=1)[:, :, None]  # [n, t * j, 1]

        def add(index: jax.Array, sums: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
            top, mass, mixed = sums
            at = self._positions(index)
            # Masked keys have probability 0, and 0 * NaN left in a page by an earlier owner is NaN: hence the zeros.
            kept = jnp.where(self._holds(at)[..., None], self._read(at), 0)
            # Heads first, as rows: left to itself the compiler turns the keys number by number.
            keys, values = (x.transpose(0, 2, 1, 3) for x in split(kept.astype(q.dtype)))
            scores = jnp.einsum("ngmk,ngsk->ngms", queries, keys, preferred_element_type=jnp.float32) * scale
            scores = jnp.where(self._sees(last_key, at[:, None])[:, None], scores, -jnp.inf)
            new_top = jnp.maximum(top, scores.max(-1))
            p, shrink = jnp.exp(scores - new_top[..., None]), jnp.exp(top - new_top)
            new = jnp.einsum("ngms,ngsv->ngmv", p.astype(q.dtype), values, preferred_element_type=jnp.float32)
            return new_top, mass * shrink + p.sum(-1), mixed * shrink[..., None] + new

        heads = queries.shape[:-1]
        width = jax.eval_shape(lambda: split(self._read(self._positions(0)).astype(q.dtype))[1]).shape[-1]
        lowest = jnp.finfo(jnp.float32).min  # finite: a query may see nothing of its first block, and padding nothing
        start = (jnp.full(heads, lowest), jnp.zeros(heads), jnp.zeros((*heads, width)))
        _, mass, mixed = jax.lax.fori_loop(0, unknown(self._num_blocks()), add, start)
        out = (mixed / jnp.maximum(mass, jnp.finfo(jnp.float32).tiny)[..., None]).astype(q.dtype)
        return out.reshape(n, g, t, j, width).transpose(0, 2, 1, 3, 4)

    @property
    def _sink_blocks(self) -> int:
        return 0 if self.window is None else -(-self.window.sinks // self.size)

    def _first(self) -> Int[Array, " n"]:
        """Where the blocks after the sinks' begin in each row: with the block of the first key that its first query
        sees."""
        if self.window is None:
            return jnp.zeros_like(self.end)
        seen = self.positions[:, 0] - self.window.size + 1
        return jnp.maximum(seen // self.size, self._sink_blocks) * self.size

    def _num_blocks(self) -> Int[Array, ""]:
        longest = jnp.maximum(self.end - self._first(), 0).max()
        return jnp.maximum(self._sink_blocks + -(-longest // self.size), 1)

    def _positions(self, index: jax.Array | int) -> Int[Array, "n s"]:
        """Of block `index` of every row."""
        behind = self._first() + (index - self._sink_blocks) * self.size
        start = jnp.where(index < self._sink_blocks, index * self.size, behind)
        return start[:, None] + jnp.arange(self.size)

    def _holds(self, at: Int[Array, "n s"]) -> Bool[Array, "n s"]:
        """Whether a row's pages hold these positions of its own, as far as its first query is concerned."""
        held = at < self.end[:, None]
        return held if self.window is None else held & self.window.sees(self.positions[:, :1], at)

    def _sees(self, query: Int[Array, "n m 1"], key: Int[Array, "n 1 s"]) -> Bool[Array, "n m s"]:
        seen = key <= query
        return seen if self.window is None else seen & self.window.sees(query, key)

    def _read(self, at: Int[Array, "n s"]) -> Float[Array, "n s width"]:
        """What the cache holds at these positions, a block's, of each row's pages; anything at all where there is no
        page."""
        _, page_size, width = self.pool.shape
        part = math.gcd(page_size, self.size)
        parts = page_size // part  # of a page; a block is made of as large ones as it can be
        first = at[:, ::part] // part
        page = jnp.take_along_axis(self.page_table, first // parts, axis=1, mode="clip")
        return self.pool.reshape(-1, part, width)[page * parts + first % parts].reshape(*at.shape, width)
