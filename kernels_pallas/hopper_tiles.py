"""What kernels for Hopper share: tiles in shared memory as its tensor cores read them, and a softmax in registers.

In JAX's Mosaic GPU primitives, which need jax >= 0.11: whoever runs no such kernel must not import this. A warpgroup
holds an array [64, n] in the layout of its products, whose rows are an array [64] in ROWS. wgmma reads both operands
from shared memory, and adds up in registers that are the product's alone: that is the form which JAX's interpreter
runs too. What is stored there must be committed before wgmma or a copy reads it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from .online_softmax import NONE
from .tiles import Ref

SIZE = 64  # of a tile's rows, and of the columns that a swizzle spans in 16 bits
TILED = plgpu.Layout.WGMMA
ROWS = TILED.reduce(1)
DTYPES = (jnp.bfloat16, jnp.float16)
PART = 128
ROW_STEP = 8  # of copies: rows of an array in memory come in as many, or a multiple


def tile(*shape: int, dtype: DTypeLike) -> Any:
    """Of shared memory, for wgmma: rows and columns are the last two, and the columns a multiple of SIZE."""
    transforms = plgpu.TilingTransform((ROW_STEP, SIZE)), plgpu.SwizzleTransform(128)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def full(value: jax.Array | float, columns: int | None = None) -> jax.Array:
    """[SIZE] or [SIZE, columns] f32"""
    shape = (SIZE,) if columns is None else (SIZE, columns)
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), ROWS if columns is None else TILED)


def number(axis: int, columns: int, start: jax.Array | int) -> jax.Array:
    """[SIZE, columns] int32: along an axis, from `start` on."""
    return start + plgpu.broadcasted_iota(jnp.int32, (SIZE, columns), axis, layout=TILED)


def across(rows: jax.Array, columns: int) -> jax.Array:
    """[SIZE] -> [SIZE, columns]"""
    return jax.lax.broadcast_in_dim(rows, (SIZE, columns), [0])


def product(columns: int, *operands: tuple[Ref, Ref]) -> jax.Array:
    """The sum of a @ b over pairs of tiles a [SIZE, k] and b [k, columns] -> [SIZE, columns] f32"""

    def add(sums: Ref) -> jax.Array:
        for a, b in operands:
            plgpu.wgmma(sums, a, b)
        return sums[...]

    return pl.run_scoped(add, plgpu.WGMMAAccumulatorRef((SIZE, columns), jnp.float32))


def parts(ref: Ref) -> list[Ref]:
    """The columns of a tile by as many as one product's registers leave room for those that hold the sums so far."""
    return [ref.at[:, start : min(start + PART, ref.shape[1])] for start in range(0, ref.shape[1], PART)]


def put(ref: Ref, value: jax.Array) -> None:
    """Into shared memory, for wgmma and copies to read."""
    ref[...] = value.astype(ref.dtype)
    plgpu.commit_smem()


def blank(ref: Ref, keep: Callable[[jax.Array], jax.Array], first: jax.Array) -> None:
    """Zero those of a tile's rows, numbered from `first` on, that are not to be kept: they may be NaN, and 0 * NaN is
    NaN. By SIZE columns at a time, which is what registers have room for."""
    kept = keep(number(0, SIZE, first))
    for start in range(0, ref.shape[1], SIZE):
        part = ref.at[:, start : start + SIZE]
        values = plgpu.layout_cast(part[...], TILED)
        part[...] = jnp.where(kept, values, jnp.zeros_like(values))
    plgpu.commit_smem()


class Sums(NamedTuple):
    """Of each row: its highest score, and what exp2(score - top) sums to, alone and by values, which are in parts; as
    in kernels_pallas/online_softmax.py."""

    top: jax.Array
    mass: jax.Array
    mixed: tuple[jax.Array, ...]

    @classmethod
    def begin(cls, sink: jax.Array | float, values: Ref) -> "Sums":
        return cls(full(sink), full(1.0), tuple(full(0.0, part.shape[1]) for part in parts(values)))

    def weigh(self, scores: jax.Array) -> tuple["Sums", jax.Array, jax.Array]:
        """scores [SIZE, keys], NONE where not seen -> sums whose values have yet to shrink by [SIZE], and to be joined
        by those of these keys; that; and probabilities [SIZE, keys]."""
        top = jnp.maximum(self.top, scores.max(axis=1))
        shrink = jnp.exp2(self.top - top)
        p = jnp.exp2(scores - across(jnp.maximum(top, NONE / 2), scores.shape[1]))  # 0 for NONE, whatever the top
        return Sums(top, self.mass * shrink + p.sum(axis=1), self.mixed), shrink, p

    def mix(self, shrink: jax.Array, p: Ref, values: Ref) -> "Sums":
        """p [SIZE, keys], values [keys, n], both tiles"""
        new = (product(part.shape[1], (p, part)) for part in parts(values))
        mixed = (old * across(shrink, old.shape[1]) + x for old, x in zip(self.mixed, new, strict=True))
        return self._replace(mixed=tuple(mixed))

    def finish(self) -> tuple[list[jax.Array], jax.Array]:
        """The mean value of each row, in parts, and log2 of the sum of exp2(score)."""
        return [part / across(self.mass, part.shape[1]) for part in self.mixed], self.top + jnp.log2(self.mass)
