"""kernels_pallas/sliding_window.py's forward pass for Hopper: its own copies, products and barriers.

A private route: the maths, the public function and the backward pass are there. A block of threads, which is one
warpgroup, has 64 queries of a head; the tensor memory accelerator fetches the next two blocks of 64 keys and values
while it is at one (FlashAttention-3, arXiv:2407.08608, without the second warpgroup). Rows of a block that no query
sees may be NaN and are zeroed where there are any, at the band's edges. For jax >= 0.11, so imported where it is used,
and for sm_90a alone: other GPUs have no wgmma.
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
from .hopper_tiles import DTYPES, ROW_STEP, SIZE, Sums, blank, parts, product, put, tile
from .online_softmax import LOG2E
from .tiles import Ref

SLOTS = 2  # blocks of keys and values in shared memory
MOST_WIDTH = 256


def fits(q: jax.Array, k: jax.Array, v: jax.Array) -> bool:
    """Whether this form can do it: 16 bits, one dtype, and widths that are multiples of 64, up to 256, which is where
    registers end. For fewer than 64 queries it does the work of 64."""
    widths = q.shape[-1], v.shape[-1]
    same = q.dtype == k.dtype == v.dtype and q.dtype in DTYPES
    return same and all(width % SIZE == 0 and width <= MOST_WIDTH for width in widths)


class _Shared(NamedTuple):
    """A block's shared memory, and a barrier for each copy into it."""

    q: Ref  # [64, k]
    k: Ref  # [SLOTS, 64, k]
    v: Ref  # [SLOTS, 64, v]; the result, at the end
    p: Ref  # [64, 64]
    lse: Ref  # [64]
    q_in: Ref
    k_in: Ref
    v_in: Ref

    @classmethod
    def types(cls, width: int, v_width: int, dtype: Any) -> "_Shared":
        return cls(
            tile(SIZE, width, dtype=dtype),
            tile(SLOTS, SIZE, width, dtype=dtype),
            tile(SLOTS, SIZE, v_width, dtype=dtype),
            tile(SIZE, SIZE, dtype=dtype),
            plgpu.SMEM((SIZE,), jnp.float32),
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=SLOTS),
            plgpu.Barrier(num_barriers=SLOTS),
        )


class _Plan(NamedTuple):
    """What all blocks of threads have in common."""

    band: Band
    scale: float
    num_queries: int
    shared: int  # heads of a group


def _kernel(
    start_ref: Ref,
    length_ref: Ref,
    sink_ref: Ref,
    q_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    out_ref: Ref,
    lse_ref: Ref,
    *scratch: Ref,
    plan: _Plan,
) -> None:
    """q_ref [b, t, h, k], k_ref [b, s, g, k], v_ref [b, s, g, v], out_ref [b, t, h, v], lse_ref [b, h, tiles * 64]."""
    mine = _Shared(*scratch)
    head, index, row = (jax.lax.axis_index(name) for name in ("head", "tile", "row"))
    group, queries = jax.lax.div(head, jnp.int32(plan.shared)), pl.ds(index * SIZE, SIZE)
    keys = Keys.of(plan.band, start_ref[row], index * SIZE, 1, plan.num_queries, length_ref[row])
    walk = keys.walk

    def fetch(turn: jax.Array | int) -> None:
        slot, rows = _slot(turn), pl.ds(walk.block(jnp.int32(turn)) * SIZE, SIZE)
        for source, shared, arrived in ((k_ref, mine.k, mine.k_in), (v_ref, mine.v, mine.v_in)):
            plgpu.copy_gmem_to_smem(source.at[row, rows, group], shared.at[slot], arrived.at[slot])

    plgpu.copy_gmem_to_smem(q_ref.at[row, queries, head], mine.q, mine.q_in)
    for turn in range(SLOTS):
        pl.when(turn < walk.length)(partial(fetch, turn))
    plgpu.barrier_wait(mine.q_in)
    out, lse = _attend(mine, keys, walk, plan.scale * LOG2E, sink_ref[head], fetch).finish()
    put(mine.lse, lse)
    result = mine.v.at[0]
    for part, values in zip(parts(result), out, strict=True):
        put(part, values)
    plgpu.copy_smem_to_gmem(result, out_ref.at[row, queries, head])
    plgpu.copy_smem_to_gmem(mine.lse, lse_ref.at[row, head, queries])
    plgpu.wait_smem_to_gmem(0)


def _slot(turn: jax.Array | int) -> jax.Array:
    return jax.lax.rem(jnp.int32(turn), jnp.int32(SLOTS))


def _attend(
    mine: _Shared, keys: Keys, walk: Walk, scale: float, sink: jax.Array, fetch: Callable[[jax.Array], None]
) -> Sums:
    def step(turn: jax.Array, sums: Sums) -> Sums:
        slot, at = _slot(turn), walk.block(turn) * SIZE
        k, v = mine.k.at[slot], mine.v.at[slot]
        plgpu.barrier_wait(mine.k_in.at[slot])
        scores = product(SIZE, (mine.q, k.transpose((1, 0)))) * scale
        sums, shrink, p = sums.weigh(keys.mask(scores, at))
        put(mine.p, p)
        plgpu.barrier_wait(mine.v_in.at[slot])
        pl.when(~keys.all_held(at))(lambda: blank(v, keys.held, at))
        sums = sums.mix(shrink, mine.p, v)
        pl.when(turn + SLOTS < walk.length)(lambda: fetch(turn + SLOTS))
        return sums

    return jax.lax.fori_loop(0, walk.length, step, Sums.begin(sink, mine.v.at[0]))


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sink: jax.Array,
    start: jax.Array,
    length: jax.Array,
    *,
    band: Band,
    scale: float,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """q [b, t, h, k], k [b, s, g, k], v [b, s, g, v], sink [h] f32 to base 2, start and length [b] int32, length <= s
    -> out [b, t, h, v] in q's dtype and lse [b, t, h] f32 to base 2. `interpret`: plgpu.InterpretGPUParams, for tests.
    """
    b, t, heads, width = q.shape
    v_width = v.shape[-1]
    q, k, v = (_whole_steps(x) for x in (q, k, v))
    tiles = pl.cdiv(t, SIZE)
    call = plgpu.kernel(
        partial(_kernel, plan=_Plan(band, scale, t, heads // k.shape[2])),
        out_type=(
            jax.ShapeDtypeStruct((*q.shape[:3], v_width), q.dtype),
            jax.ShapeDtypeStruct((b, heads, tiles * SIZE), jnp.float32),
        ),
        scratch_types=_Shared.types(width, v_width, q.dtype),
        grid=(heads, tiles, b),
        grid_names=("head", "tile", "row"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="hopper_sliding_window",
        interpret=interpret,
    )
    out, lse = call(start, length, sink, q, k, v)
    return out[:, :t], lse[:, :, :t].swapaxes(1, 2)


def _whole_steps(x: jax.Array) -> jax.Array:
    """[b, n, ...] with n a multiple of what copies go by."""
    missing = -x.shape[1] % ROW_STEP
    return jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0))) if missing else x
