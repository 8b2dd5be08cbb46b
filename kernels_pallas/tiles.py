"""Tiles of arrays in memory, inside kernels: rows read and written where a mask says so, at any width.

JAX's Triton route has arrays of powers of two only. A width that is none is held in two parts that are (192 is 128 and
64), so that no product is done on padding, or in one with its last columns masked where two would save nothing. What is
masked is neither read nor written, wherever it would be.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .dispatch import dot

MIN_SIZE = 16  # of a part: the least that tensor cores take
Ref = Any  # jax has no public name for one
Index = jax.Array | int
Parts = tuple[jax.Array, ...]  # of an array [n, width]: [n, size] each, zeros beyond the width


class Part(NamedTuple):
    """Columns [start, start + size) of a width."""

    start: int
    size: int
    width: int

    @property
    def columns(self) -> jax.Array:
        return self.start + jax.lax.broadcasted_iota(jnp.int32, (1, self.size), 1)

    def mask(self, rows: jax.Array) -> jax.Array:
        rows = rows[:, None]
        return rows if self.start + self.size <= self.width else rows & (self.columns < self.width)


def split(width: int) -> tuple[Part, ...]:
    """Into two parts where they hold less padding than one does."""
    whole = power_of_two(width)
    half = whole // 2
    if whole == MIN_SIZE or width == whole or power_of_two(width - half) == half:
        return (Part(0, whole, width),)
    return Part(0, half, width), Part(half, power_of_two(width - half), width)


def power_of_two(size: int) -> int:
    """The first that is at least `size` and MIN_SIZE."""
    return max(1 << (size - 1).bit_length(), MIN_SIZE)


def count(size: int, first: Index = 0) -> jax.Array:
    """[size] int32, from `first` on."""
    return first + jax.lax.broadcasted_iota(jnp.int32, (size,), 0)


def load(ref: Ref, *index: Index, mask: jax.Array) -> jax.Array:
    """Zeros where masked. Index: for each axis of the memory a number or an int32 array, as wide as the mask."""
    from jax.experimental.pallas import triton  # to be removed from JAX: whoever runs no kernel must not miss it

    return triton.load(ref.at[index], mask=mask, other=jnp.zeros((), ref.dtype))


def load_rows(ref: Ref, *index: Index, mask: jax.Array) -> Parts:
    """Rows of the memory's last axis; index: for each of its other axes a number, or an array [n], as wide as mask."""
    parts = split(ref.shape[-1])
    return tuple(load(ref, *_upright(index), part.columns, mask=part.mask(mask)) for part in parts)


def store(ref: Ref, *index: Index, value: jax.Array, mask: jax.Array) -> None:
    from jax.experimental.pallas import triton

    triton.store(ref.at[index], value.astype(ref.dtype), mask=mask)


def store_rows(ref: Ref, *index: Index, value: Parts, mask: jax.Array) -> None:
    for part, values in zip(split(ref.shape[-1]), value, strict=True):
        store(ref, *_upright(index), part.columns, value=values, mask=part.mask(mask))


def _upright(index: tuple[Index, ...]) -> list[Index]:
    """Arrays [n] as [n, 1]."""
    return [x[:, None] if isinstance(x, jax.Array) and x.ndim else x for x in index]


def inner(a: Parts, b: Parts) -> jax.Array:
    """a [m, n], b [s, n] -> [m, s] f32"""
    first, *rest = (dot(x, y, transposed=True) for x, y in zip(a, b, strict=True))
    return sum(rest, first)


def mix(weights: jax.Array, b: Parts) -> Parts:
    """weights [m, s] f32, b [s, n] -> [m, n] f32"""
    return tuple(dot(weights.astype(x.dtype), x) for x in b)


def plus(a: Parts, b: Parts) -> Parts:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def zeros(rows: int, width: int) -> Parts:
    return tuple(jnp.zeros((rows, part.size), jnp.float32) for part in split(width))
