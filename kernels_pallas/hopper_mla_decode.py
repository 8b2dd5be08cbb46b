"""kernels_pallas/mla_decode.py's kernel for Hopper: its own copies, products and barriers.

A private route: the maths, the public function and its use of `merge` are there. A block of threads has 64 queries of
a row, heads and all, and is two warpgroups, each of which has half of the latent's columns in its registers: 64 x 512
sums are more than one has room for. Both compute all scores, so that nothing but probabilities need pass from one to
the other; where tensor cores are not what a decode step waits for, that is free. The first warpgroup has the tensor
memory accelerator fetch the next two tiles of 64 keys, page by page, while both are at one. Keys that no query sees
may be NaN and are zeroed; pages that hold no other are not read.

For jax >= 0.11, so imported where it is used, and for sm_90a alone: other GPUs have no wgmma.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .band import Band, Walk
from .hopper_keys import Keys
from .hopper_tiles import DTYPES, ROW_STEP, SIZE, Sums, blank, product, put, tile
from .online_softmax import LOG2E, NONE
from .tiles import Ref

SLOTS = 2  # tiles of keys in shared memory
GROUPS = 2  # warpgroups
SHARED_BYTES = 232448  # that a block of an H100 or H200 can have


def fits(q: jax.Array, pool: jax.Array, latent: int) -> bool:
    """Whether this form can do it: 16 bits, one dtype; a latent of a multiple of 128 and a rotary part of a multiple
    of 64 numbers, together no more than shared memory holds (512 and 64); pages of 8, 16, 32 or multiples of 64."""
    width, page_size = pool.shape[-1], pool.shape[2]
    widths = latent % (GROUPS * SIZE) == (width - latent) % SIZE == 0 and _bytes(width) <= SHARED_BYTES
    pages = page_size % SIZE == 0 or (page_size % ROW_STEP == 0 and SIZE % page_size == 0)
    return q.dtype == pool.dtype and q.dtype in DTYPES and widths and pages


def _bytes(width: int) -> int:
    return 2 * SIZE * (width * (1 + SLOTS) + SIZE) + 2048


class _Shared(NamedTuple):
    """A block's shared memory, and its barriers. Latents are in as many parts as there are warpgroups."""

    q: Ref  # [GROUPS, 64, half]
    q_rotary: Ref  # [64, rotary]
    keys: Ref  # [SLOTS, GROUPS, 64, half]
    rotary: Ref  # [SLOTS, 64, rotary]
    p: Ref  # [64, 64]
    q_in: Ref
    keys_in: Ref
    weighed: Ref  # both have done with a tile's scores, and the first has stored its probabilities
    mixed: Ref  # both have done with a tile

    @classmethod
    def types(cls, latent: int, rotary: int, copies: int, dtype: Any) -> "_Shared":
        half = latent // GROUPS
        return cls(
            tile(GROUPS, SIZE, half, dtype=dtype),
            tile(SIZE, rotary, dtype=dtype),
            tile(SLOTS, GROUPS, SIZE, half, dtype=dtype),
            tile(SLOTS, SIZE, rotary, dtype=dtype),
            tile(SIZE, SIZE, dtype=dtype),
            plgpu.Barrier(num_arrivals=GROUPS + 1),
            plgpu.Barrier(num_arrivals=copies * (GROUPS + 1), num_barriers=SLOTS),
            plgpu.Barrier(num_arrivals=GROUPS),
            plgpu.Barrier(num_arrivals=GROUPS),
        )

    def fetch_queries(self, source: Ref) -> None:
        """source [64, width]"""
        self._fetch(source, self.q, self.q_rotary, self.q_in)

    def fetch_keys(self, source: Ref, slot: jax.Array, offset: int) -> None:
        """source [n, width] -> n of the slot's keys, from `offset` on."""
        rows = pl.ds(offset, source.shape[0])
        self._fetch(source, self.keys.at[slot, :, rows], self.rotary.at[slot, rows], self.keys_in.at[slot])

    def scores(self, slot: jax.Array) -> jax.Array:
        """[64, 64] f32, of all queries and the slot's keys"""
        latents = ((self.q.at[part], self.keys.at[slot, part].transpose((1, 0))) for part in range(GROUPS))
        return product(SIZE, *latents, (self.q_rotary, self.rotary.at[slot].transpose((1, 0))))

    def _fetch(self, source: Ref, latent: Ref, rotary: Ref, arrived: Ref) -> None:
        half, width = latent.shape[2], source.shape[1]
        for part in range(GROUPS):
            plgpu.copy_gmem_to_smem(source.at[:, part * half : (part + 1) * half], latent.at[part], arrived)
        plgpu.copy_gmem_to_smem(source.at[:, GROUPS * half : width], rotary, arrived)


class _Plan(NamedTuple):
    """What all blocks of threads have in common."""

    band: Band
    scale: float
    num_queries: int
    heads: int
    page_size: int

    @property
    def piece(self) -> int:
        """Keys that one copy fetches."""
        return min(self.page_size, SIZE)


class _Turns(NamedTuple):
    """Those of a walk that are one split's: from `begin` to before `stop`."""

    walk: Walk
    begin: jax.Array
    stop: jax.Array

    @classmethod
    def of(cls, walk: Walk, split: jax.Array, splits: int) -> "_Turns":
        share = jax.lax.div(walk.length + (splits - 1), jnp.int32(splits))
        return cls(walk, split * share, jnp.minimum(split * share + share, walk.length))

    def at(self, turn: jax.Array) -> jax.Array:
        """The position of the turn's first key."""
        return self.walk.block(turn) * SIZE

    def slot(self, turn: jax.Array) -> jax.Array:
        return jax.lax.rem(turn - self.begin, jnp.int32(SLOTS))


def _kernel(
    table_ref: Ref,
    start_ref: Ref,
    end_ref: Ref,
    q_ref: Ref,
    pool_ref: Ref,
    out_ref: Ref,
    lse_ref: Ref,
    *scratch: Ref,
    plan: _Plan,
) -> None:
    """q_ref [b, m, width], m a multiple of 64, pool_ref [pages, page_size, width], out_ref [splits, b, m, latent]."""
    mine = _Shared(*scratch)
    index, split, row, group = (jax.lax.axis_index(name) for name in ("tile", "split", "row", "group"))
    keys = Keys.of(plan.band, start_ref[row], index * SIZE, plan.heads, plan.num_queries, end_ref[row])
    turns, queries = _Turns.of(keys.walk, split, lse_ref.shape[0]), pl.ds(index * SIZE, SIZE)

    def fetch(turn: jax.Array) -> None:
        for offset in range(0, SIZE, plan.piece):
            page, place = _source(plan, keys, turns.at(turn), offset, lambda i: table_ref[row, i])
            mine.fetch_keys(pool_ref.at[page, pl.ds(place, plan.piece)], turns.slot(turn), offset)

    @pl.when(group == 0)
    def _() -> None:
        mine.fetch_queries(q_ref.at[row, queries])
        for turn in range(SLOTS):
            pl.when(turns.begin + turn < turns.stop)(partial(fetch, turns.begin + turn))

    plgpu.barrier_wait(mine.q_in)
    out, lse = _attend(mine, keys, turns, plan.scale * LOG2E, group, fetch).finish()
    first = group * mine.q.shape[2]
    for values in out:
        out_ref[split, row, queries, pl.ds(first, values.shape[1])] = values
        first += values.shape[1]

    @pl.when(group == 0)
    def _() -> None:
        lse_ref[split, row, queries] = lse


def _source(
    plan: _Plan, keys: Keys, at: jax.Array, offset: int, page: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """The page, which `page` looks up, and where in it, of what lies `offset` behind position `at`, a block's first.
    Where no query sees any of that, the page may be anybody's: then of a piece of the block that one does see."""
    position, first_kept = at + offset, at
    held = (position < keys.end) & (position <= keys.last)
    if plan.band.window is not None:
        lowest = keys.first - plan.band.window + 1
        held &= (position + plan.piece > lowest) | (position < plan.band.sinks)
        first_kept = jnp.where(plan.band.keeps(keys.first, at), at, lowest)
    position = jnp.where(held, position, first_kept - jax.lax.rem(first_kept, jnp.int32(plan.piece)))
    page_size = jnp.int32(plan.page_size)
    return page(jax.lax.div(position, page_size)), pl.multiple_of(jax.lax.rem(position, page_size), plan.piece)


def _attend(
    mine: _Shared,
    keys: Keys,
    turns: _Turns,
    scale: float,
    group: jax.Array,
    fetch: Callable[[jax.Array], None],
) -> Sums:
    """Of the values, the warpgroup's half."""

    def refill(turn: jax.Array) -> None:
        plgpu.barrier_wait(mine.mixed)
        pl.when(turn < turns.stop)(lambda: fetch(turn))

    def step(turn: jax.Array, sums: Sums) -> Sums:
        slot, at = turns.slot(turn), turns.at(turn)
        values = mine.keys.at[slot, group]
        plgpu.barrier_wait(mine.keys_in.at[slot])
        sums, shrink, p = sums.weigh(keys.mask(mine.scores(slot) * scale, at))
        pl.when(group == 0)(lambda: put(mine.p, p))
        plgpu.barrier_arrive(mine.weighed)
        plgpu.barrier_wait(mine.weighed)
        pl.when(~keys.all_held(at))(lambda: blank(values, keys.held, at))
        sums = sums.mix(shrink, mine.p, values)
        plgpu.barrier_arrive(mine.mixed)
        pl.when(group == 0)(lambda: refill(turn + SLOTS))
        return sums

    return jax.lax.fori_loop(turns.begin, turns.stop, step, Sums.begin(NONE, mine.keys.at[0, 0]))


def pieces(
    q: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    start: jax.Array,
    end: jax.Array,
    *,
    latent: int,
    band: Band,
    scale: float,
    splits: int,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """q [b, t, h, width], pool [pages, 1, page_size, width], page_table [b, n], start and end [b] int32 -> out
    [splits, b, t, h, latent] f32 and lse [splits, b, t, h] f32 to base 2, each of a part of the keys below `end`.
    `interpret`: plgpu.InterpretGPUParams, for tests."""
    b, t, heads, width = q.shape
    rows = q.reshape(b, t * heads, width)
    rows = jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % SIZE), (0, 0)))
    plan = _Plan(band, scale, t, heads, pool.shape[2])
    call = plgpu.kernel(
        partial(_kernel, plan=plan),
        out_type=(
            jax.ShapeDtypeStruct((splits, *rows.shape[:2], latent), jnp.float32),
            jax.ShapeDtypeStruct((splits, *rows.shape[:2]), jnp.float32),
        ),
        scratch_types=_Shared.types(latent, width - latent, SIZE // plan.piece, q.dtype),
        grid=(rows.shape[1] // SIZE, splits, b),
        grid_names=("tile", "split", "row"),
        num_threads=GROUPS,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="hopper_mla_decode",
        interpret=interpret,
    )
    out, lse = call(page_table, start, end, rows, pool.reshape(-1, plan.page_size, width))
    shape = splits, b, t, heads
    return out[:, :, : t * heads].reshape(*shape, latent), lse[:, :, : t * heads].reshape(shape)
