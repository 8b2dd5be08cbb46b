"""The rows of an attention kernel's tile: queries, each with all heads that share one group's keys and values.

So a decode step of one query fills a tile with its heads, and a group's keys are read once for all of them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .tiles import Parts, Ref, count, load, load_rows, store, store_rows


class Program(NamedTuple):
    """Of a grid (tiles, groups, rows of the batch): where it is."""

    tile: jax.Array
    group: jax.Array
    row: jax.Array

    @classmethod
    def this(cls) -> "Program":
        return cls(pl.program_id(0), pl.program_id(1), pl.program_id(2))


class QueryTile(NamedTuple):
    """Of arrays [b, t, h] and [b, t, h, n]: m places in one row of the batch and one group of heads."""

    row: jax.Array
    query: jax.Array  # [m]
    head: jax.Array  # [m]
    real: jax.Array  # [m] bool
    position: jax.Array  # [m], -1 where not real
    first: jax.Array  # the lowest and the highest position; last < first where there is none
    last: jax.Array

    @classmethod
    def of(
        cls, program: Program, index: jax.Array, size: int, shared: int, start: jax.Array, num_queries: jax.Array | int
    ) -> "QueryTile":
        """Number `index` of all that have `size` places for the first `num_queries` queries, of which the first has
        position `start`, and `shared` heads of each."""
        place = count(size, index * size)
        query = jax.lax.div(place, shared)
        first, last = (jax.lax.div(index * size + offset, shared) for offset in (0, size - 1))
        real = query < num_queries
        return cls(
            program.row,
            query,
            program.group * shared + jax.lax.rem(place, shared),
            real,
            jnp.where(real, start + query, -1),
            start + first,
            start + jnp.minimum(last, num_queries - 1),
        )

    def load(self, ref: Ref) -> jax.Array:
        return load(ref, self.row, self.query, self.head, mask=self.real)

    def load_rows(self, ref: Ref) -> Parts:
        return load_rows(ref, self.row, self.query, self.head, mask=self.real)

    def store(self, ref: Ref, value: jax.Array, mask: jax.Array) -> None:
        store(ref, self.row, self.query, self.head, value=value, mask=mask)

    def store_rows(self, ref: Ref, value: Parts, mask: jax.Array) -> None:
        store_rows(ref, self.row, self.query, self.head, value=value, mask=mask)
