"""Attention of a step's queries over their paged keys, in blocks of a fixed number of positions from 0 on.

The walk ends at the longest row's last key, so that a wide page table costs nothing and no row's keys are ever all in
memory at once. Without a window, where tables are wide, it goes on with ever fewer rows, the longest, so that one long
row does not make all others as dear (never in the deterministic arithmetic, whose shapes are fixed). With a window it
goes from the sinks to the block of each row's first visible key: what pages hold in
between is never used, and may be another position's. Every block begins at a multiple of its size, so that it can be
read in whole pages, or in the whole parts that pages and blocks share. The running maximum and sum are those of the
online softmax (arXiv:1805.02867), float32. A block that a query sees nothing of leaves its sums as they are, to the
bit: for the deterministic arithmetic, how wide a page table is, how large its pages are, and how long the neighbours
are, changes nothing.
"""

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from .architecture import Window
from .arithmetic import unknown
from .cache import PageView, Pool

Read = Callable[[int, int], Float[Array, "n heads s width"]]  # the cache's heads, from the first to before the last
Split = Callable[[Read], tuple[Float[Array, "n g s k"], Float[Array, "n g s v"]]]

# Keys at a time, as measured on CPU: for a few queries a block that stays in cache, for a chunk one whose products are
# worth starting. Chunks of several rows are mostly short prompts, which a large block would exceed; a row of its own is
# more often far behind in a long one.
FEW, FEW_BLOCK, CHUNK_BLOCK, LONE_CHUNK_BLOCK = 16, 16, 64, 128

NARROW_FROM = 1024  # positions of a table from which rows may differ enough in length to be left out one by one


class Sums(NamedTuple):
    """The online softmax of each query: its highest score, and what exp(score - top) sums to, alone and by values."""

    top: Float[Array, "n g m"]
    mass: Float[Array, "n g m"]
    mixed: Float[Array, "n g m v"]

    def rows(self, which: slice) -> "Sums":
        return Sums(self.top[which], self.mass[which], self.mixed[which])


class KeyBlocks(NamedTuple):
    """Where the keys of n rows of t queries are. Query i of row r sees positions up to positions[r, i]; end[r] is the
    first position of row r that holds nothing."""

    pool: Pool
    page_table: Int[Array, "n pages"]
    positions: Int[Array, "n t"]
    end: Int[Array, " n"]
    size: int  # positions in a block
    window: Window | None = None
    narrows: bool = False  # whether the walk leaves rows out once their keys are through

    @classmethod
    def of(cls, pool: Pool, view: PageView, window: Window | None) -> "KeyBlocks":
        """For a step whose tokens are written."""
        n, t = view.positions.shape
        size = FEW_BLOCK if t < FEW else LONE_CHUNK_BLOCK if n == 1 else CHUNK_BLOCK
        narrows = n > 1 and window is None and view.page_table.shape[1] * pool.shape[2] >= NARROW_FROM
        end = view.positions[:, 0] + view.length
        return cls(pool, view.page_table, view.positions, end, size, window, narrows)

    def attend(self, q: Float[Array, "n t g j k"], split: Split, scale: float) -> Float[Array, "n t g j v"]:
        """Each group's j heads share keys and values, which `split` takes out of what the cache holds of a block."""
        n, t, g, j, k = q.shape
        queries = q.transpose(0, 2, 1, 3, 4).reshape(n, g, t * j, k)
        if self.narrows:
            order = jnp.argsort(-self._num_blocks())
            mixed = self._rows(order)._walk(queries[order], split, scale, _quarters(n))[jnp.argsort(order)]
        else:
            mixed = self._walk(queries, split, scale, [n])
        return mixed.astype(q.dtype).reshape(n, g, t, j, -1).transpose(0, 2, 1, 3, 4)

    def _rows(self, which: slice | Int[Array, " m"]) -> "KeyBlocks":
        return self._replace(page_table=self.page_table[which], positions=self.positions[which], end=self.end[which])

    def _walk(
        self, queries: Float[Array, "n g m k"], split: Split, scale: float, counts: list[int]
    ) -> Float[Array, "n g m v"]:
        """With the first counts[0] rows to the end of the longest of those that are not among the first counts[1], with
        these on to that of the longest not among the first counts[2], and so on."""
        sums, done, through = self._nothing(queries, split), jnp.int32(0), []
        for count, rest in itertools.pairwise([*counts, 0]):
            some = self._rows(slice(count))
            until = some._num_blocks()[rest:].max()
            add = partial(some._add, queries[:count], split, scale)
            sums = jax.lax.fori_loop(done, unknown(until), add, sums)
            through.append(sums.rows(slice(rest, None)))
            sums, done = sums.rows(slice(rest)), until
        tiny = jnp.finfo(jnp.float32).tiny
        return jnp.concatenate([x.mixed / jnp.maximum(x.mass, tiny)[..., None] for x in reversed(through)])

    def _nothing(self, queries: Float[Array, "n g m k"], split: Split) -> Sums:
        heads = queries.shape[:-1]
        width = jax.eval_shape(lambda: split(partial(self._read, self._positions(0), queries.dtype))[1]).shape[-1]
        lowest = jnp.finfo(jnp.float32).min  # finite: a query may see nothing of its first block, and padding nothing
        return Sums(jnp.full(heads, lowest), jnp.zeros(heads), jnp.zeros((*heads, width)))

    def _add(
        self, queries: Float[Array, "n g m k"], split: Split, scale: float, index: Int[Array, ""], sums: Sums
    ) -> Sums:
        """The sums with block `index` of every row."""
        at = self._positions(index)
        holds = self._holds(at)
        keys, values = split(partial(self._read, at, queries.dtype))
        scores = jnp.einsum("ngmk,ngsk->ngms", queries, keys, preferred_element_type=jnp.float32) * scale
        last_key = jnp.repeat(self.positions, queries.shape[2] // self.positions.shape[1], axis=1)[:, :, None]
        seen = self._sees(last_key, at[:, None]) & holds[:, None]  # [n, m, s]
        scores = jnp.where(seen[:, None], scores, -jnp.inf)
        # Masked keys have probability 0, and 0 * NaN left in a page by an earlier owner is NaN: hence the zeros.
        values = jnp.where(holds[:, None, :, None], values, 0)
        top = jnp.maximum(sums.top, scores.max(-1))
        p, shrink = jnp.exp(scores - top[..., None]), jnp.exp(sums.top - top)
        mixed = jnp.einsum("ngms,ngsv->ngmv", p.astype(queries.dtype), values, preferred_element_type=jnp.float32)
        return Sums(top, sums.mass * shrink + p.sum(-1), sums.mixed * shrink[..., None] + mixed)

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

    def _num_blocks(self) -> Int[Array, " n"]:
        keys = jnp.maximum(self.end - self._first(), 0)
        return jnp.maximum(self._sink_blocks + -(-keys // self.size), 1)

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

    def _read(self, at: Int[Array, "n s"], dtype: DTypeLike, first: int, last: int) -> Float[Array, "n heads s width"]:
        """What the cache holds at a block's positions, in each row's pages, of these heads; anything where there is no
        page."""
        _, heads, page_size, width = self.pool.shape
        part = math.gcd(page_size, self.size)
        parts = page_size // part  # of a page; a block is made of as large ones as it can be
        number = at[:, ::part] // part
        page = jnp.take_along_axis(self.page_table, number // parts, axis=1, mode="clip")
        head = (page * heads)[:, None] + jnp.arange(first, last)[:, None]  # [n, heads, parts of the block]
        found = self.pool.reshape(-1, part, width)[head * parts + (number % parts)[:, None]]
        return found.reshape(len(at), last - first, self.size, width).astype(dtype)


def _quarters(count: int) -> list[int]:
    """Falling to 1, each at most a quarter of the last."""
    counts = [count]
    while counts[-1] > 1:
        counts.append(max(counts[-1] // 4, 1))
    return counts
