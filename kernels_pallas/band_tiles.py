"""Attention of a kernel's tile of queries over its band of keys, and where kernels find keys: in a row, or in pages.

What `kernels_pallas.band_walk` is for XLA's loops. A band is walked in blocks of keys; those of a block that no query
of the tile sees are never read.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from .band import Band
from .online_softmax import LOG2E, Sums
from .query_tile import Program, QueryTile
from .tiles import Parts, Ref, count, inner, load, load_rows, mix, power_of_two, split

WIDE = 1024  # bytes of a key and its value; of more of them fewer are held at once
PROGRAMS, SPLIT_BLOCKS = 264, 4  # two for each of a GPU's 132 processors; what a split must have to pay for the merge
State = TypeVar("State")
Read = Callable[[jax.Array, jax.Array], tuple[Parts, Parts]]  # positions [s], a mask [s] -> keys, values


class Plan(NamedTuple):
    """What all programs of a kernel have in common."""

    band: Band
    scale: float
    shared: int  # heads of a group
    places: int  # of a tile, for queries
    block: int  # keys
    warps: int
    splits: int = 1  # of a walk over keys, each by a program of its own

    @classmethod
    def of(
        cls, band: Band, scale: float, q: jax.Array, groups: int, v_width: int, num_keys: int, *, backward: bool = False
    ) -> "Plan":
        """Of the largest sizes whose kernels fit into registers and shared memory, as compiled for sm_80 and sm_90a."""
        _, t, h, width = q.shape
        wide = (width + v_width) * q.dtype.itemsize > WIDE
        narrow = wide or (backward and q.dtype.itemsize == 4)  # keys in float32 and their gradients
        places, block = (64 if backward or wide else 128), (32 if narrow else 64)
        shared = h // groups
        places, block = min(places, power_of_two(t * shared)), min(block, power_of_two(num_keys))
        return cls(band, scale, shared, places, block, warps=8 if places >= 64 else 4)

    def split(self, q: jax.Array, num_keys: int) -> "Plan":
        """With walks in as many splits as it takes to keep a GPU busy, but none of fewer than SPLIT_BLOCKS blocks of
        the longest that there may be."""
        window = self.band.window
        longest = num_keys if window is None else min(num_keys, self.band.sinks + window + q.shape[1])
        wanted = pl.cdiv(PROGRAMS, math.prod(self.grid(q)))
        return self._replace(splits=max(min(wanted, longest // (SPLIT_BLOCKS * self.block)), 1))

    def grid(self, q: jax.Array) -> tuple[int, int, int]:
        """Tiles of all queries, groups, and rows of the batch, once for each split."""
        b, t, h, _ = q.shape
        return pl.cdiv(t * self.shared, self.places), h // self.shared, b * self.splits


class Block(NamedTuple):
    keys: Parts
    values: Parts
    scores: jax.Array  # [m, s] f32, to base 2
    seen: jax.Array  # [m, s] bool


def attend(
    plan: Plan,
    tile: QueryTile,
    q: Parts,
    sink: jax.Array,
    end: jax.Array,
    read: Read,
    width: int,
    split_index: jax.Array | int = 0,
) -> tuple[Parts, jax.Array]:
    """sink [m] f32, to base 2 -> the result [m, width] f32, and log2 of what each softmax divided by [m] f32."""

    def add(sums: Sums, block: Block) -> Sums:
        return sums.add(block.scores, block.seen, lambda p: mix(p, block.values))

    nothing = Sums.begin(sink, tuple(part.size for part in split(width)))
    return over_keys(plan, tile, q, end, read, nothing, add, split_index).finish()


def over_keys(
    plan: Plan,
    tile: QueryTile,
    q: Parts,
    end: jax.Array,
    read: Read,
    state: State,
    add: Callable[[State, Block], State],
    split_index: jax.Array | int = 0,
) -> State:
    """Through the blocks with keys below `end` that the tile's queries see, or one split of them."""
    walk = plan.band.keys(tile.first, tile.last, end, plan.block)
    share = jax.lax.div(walk.length + (plan.splits - 1), plan.splits)
    first = split_index * share

    def turn(index: jax.Array, state: State) -> State:
        at = count(plan.block, walk.block(index) * plan.block)
        held = (at < end) & plan.band.keeps(tile.first, at)
        keys, values = read(at, held)
        seen = held[None, :] & plan.band.sees(tile.position[:, None], at[None, :])
        return add(state, Block(keys, values, inner(q, keys) * (plan.scale * LOG2E), seen))

    return jax.lax.fori_loop(first, jnp.minimum(first + share, walk.length), turn, state)


def read_row(
    k_ref: Ref, v_ref: Ref, here: Program, dtype: DTypeLike, at: jax.Array, held: jax.Array
) -> tuple[Parts, Parts]:
    """Of keys [b, s, g, k] and values [b, s, g, v]."""
    keys, values = (load_rows(ref, here.row, at, here.group, mask=held) for ref in (k_ref, v_ref))
    return _cast(keys, dtype), _cast(values, dtype)


def read_pages(
    pool_ref: Ref, table_ref: Ref, here: Program, dtype: DTypeLike, at: jax.Array, held: jax.Array
) -> tuple[Parts, Parts]:
    """Of a pool [pages, 2g, page_size, k], keys before values, in the order of a table [b, pages]."""
    _, heads, page_size, _ = pool_ref.shape
    page, slot = load(table_ref, here.row, jax.lax.div(at, page_size), mask=held), jax.lax.rem(at, page_size)
    key_head, value_head = here.group, here.group + heads // 2
    keys, values = (load_rows(pool_ref, page, head, slot, mask=held) for head in (key_head, value_head))
    return _cast(keys, dtype), _cast(values, dtype)


def _cast(parts: Parts, dtype: DTypeLike) -> Parts:
    return tuple(x.astype(dtype) for x in parts)
