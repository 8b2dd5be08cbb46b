"""Which keys the queries of a tile see, in a kernel for Hopper, and which of them may be in shared memory at all.

For the blocks of SIZE keys of a walk (kernels_pallas/band.py). Most blocks are seen whole by all queries, and what is
to be done for the others is left out for them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from .band import Band, Walk
from .hopper_tiles import SIZE, number
from .online_softmax import NONE


class Keys(NamedTuple):
    """A tile's row i is of the query at position start + (row + i) // shared, and those from `first` to `last` are
    real; the keys are those below `end`."""

    band: Band
    start: jax.Array
    row: jax.Array
    shared: int
    first: jax.Array
    last: jax.Array
    end: jax.Array

    @classmethod
    def of(cls, band: Band, start: jax.Array, row: jax.Array, shared: int, num_queries: int, end: jax.Array) -> "Keys":
        first, last = (jax.lax.div(row + offset, jnp.int32(shared)) for offset in (0, SIZE - 1))
        return cls(band, start, row, shared, start + first, start + jnp.minimum(last, num_queries - 1), end)

    @property
    def walk(self) -> Walk:
        return self.band.keys(self.first, self.last, self.end, SIZE)

    def mask(self, scores: jax.Array, at: jax.Array) -> jax.Array:
        """scores [SIZE, SIZE] of the keys from position `at` on -> NONE for what a query does not see."""
        return jax.lax.cond(self._all_seen(at), lambda x: x, lambda x: self._mask(x, at), scores)

    def _mask(self, scores: jax.Array, at: jax.Array) -> jax.Array:
        row = number(0, SIZE, self.row)
        query = self.start + (row if self.shared == 1 else jax.lax.div(row, jnp.full_like(row, self.shared)))
        key = number(1, SIZE, at)
        return jnp.where((key < self.end) & self.band.sees(query, key), scores, NONE)

    def _all_seen(self, at: jax.Array) -> jax.Array:
        inside = (at + SIZE <= self.end) & (at + SIZE <= self.first + 1)
        return inside if self.band.window is None else inside & (at > self.last - self.band.window)

    def held(self, at: jax.Array) -> jax.Array:
        """Whether any query may see it."""
        return (at < self.end) & (at <= self.last) & self.band.keeps(self.first, at)

    def all_held(self, at: jax.Array) -> jax.Array:
        """Of the block that begins there. False for blocks with sinks, which costs little."""
        inside = (at + SIZE <= self.end) & (at + SIZE <= self.last + 1)
        return inside if self.band.window is None else inside & (at > self.first - self.band.window)
