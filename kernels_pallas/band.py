"""The band of keys that causal queries see through a window with sinks, and the blocks that it is made of.

The query at position p sees the key at position s <= p where p - s < window (Longformer, arXiv:2004.05150) or
s < sinks (attention sinks, arXiv:2309.17453); without a window, all that came before. Positions are absolute. A walk
over keys in blocks is the blocks of the sinks, from position 0 on, and then those from the first to the last key that
any query of a run sees: what lies between is skipped, not masked.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

FAR = 1 << 30


class Walk(NamedTuple):
    """`length` blocks of keys: `sinks` from position 0 on, the others from `begin` on, which is counted in blocks."""

    sinks: jax.Array
    begin: jax.Array
    length: jax.Array

    def block(self, index: jax.Array) -> jax.Array:
        """The number of the walk's block `index`. Past `length` it is one that the queries see nothing of."""
        return jnp.where(index < self.sinks, index, index - self.sinks + self.begin)


@dataclass(frozen=True, slots=True)
class Band:
    window: int | None
    sinks: int

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}; it must be at least 1, or None for all earlier keys")
        if self.sinks < 0:
            raise ValueError(f"sinks is {self.sinks}; it must be at least 0")

    def sees(self, query: jax.Array, key: jax.Array) -> jax.Array:
        return (key <= query) & self.keeps(query, key)

    def keeps(self, query: jax.Array, key: jax.Array) -> jax.Array:
        """Whether the key has not left the window when it is the query's turn: later queries see no others."""
        return key >= 0 if self.window is None else (key > query - self.window) | (key < self.sinks)

    def keys(self, first: jax.Array, last: jax.Array, end: jax.Array, size: int) -> Walk:
        """The blocks of `size` keys below `end` that the queries from `first` to `last` see; none if last < first. The
        block that the window begins in is among them even where `end` comes before the window."""
        stop = jnp.where(last < first, 0, _ceil_div(jnp.minimum(last + 1, end), size))
        if self.window is None:
            return Walk(jnp.zeros_like(stop), jnp.zeros_like(stop), stop)
        begin = jax.lax.div(jnp.maximum(first - self.window + 1, 0), size)
        sinks = jnp.minimum(jnp.minimum(-(-self.sinks // size), begin), stop)
        return Walk(sinks, begin, sinks + jnp.maximum(stop - begin, 0))

    def queries(self, first: jax.Array, last: jax.Array, end: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The positions of the first query that sees any key from `first` to `last` and below `end`, and of the first
        query behind them all."""
        last = jnp.minimum(last, end - 1)
        stop = FAR if self.window is None else jnp.where(first < self.sinks, FAR, last + self.window)
        return first, jnp.where(last < first, first, stop)


def _ceil_div(number: jax.Array, size: int) -> jax.Array:
    """Of what is not negative; `//` would ask for the sign too, which costs a kernel."""
    return jax.lax.div(number + (size - 1), size)
