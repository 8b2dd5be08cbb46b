"""A softmax over keys that come block by block (arXiv:1805.02867), in float32 and to base 2, inside kernels and out.

Scores are in units of log 2: natural ones times LOG2E. The sums begin with a sink, a score that joins the denominator
and has no value; where there is none, it is NONE, whose share of a query's sum is 0 from the first key on, and all of
it where no key is seen: the result is then 0 and not 0 / 0.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

LOG2E = math.log2(math.e)
NONE = -1e30  # finite: the difference of two of them is 0, not NaN


class Sums(NamedTuple):
    """Of each query: its highest score, and what exp2(score - top) sums to, alone and by values."""

    top: jax.Array  # [..., m] f32
    mass: jax.Array  # [..., m] f32
    mixed: tuple[jax.Array, ...]  # [..., m, v] f32, v in parts

    @classmethod
    def begin(cls, sink: jax.Array, widths: tuple[int, ...]) -> "Sums":
        """sink [..., m] f32"""
        return cls(sink, jnp.ones_like(sink), tuple(jnp.zeros((*sink.shape, v), jnp.float32) for v in widths))

    def add(self, scores: jax.Array, seen: jax.Array, mix: Callable[[jax.Array], tuple[jax.Array, ...]]) -> "Sums":
        """With the keys of a block: scores [..., m, s] f32, what is not `seen` being anything; `mix` has their values
        and makes probabilities [..., m, s] into [..., m, v]."""
        scores = jnp.where(seen, scores, NONE)
        top = jnp.maximum(self.top, scores.max(-1))
        shrink = jnp.exp2(self.top - top)
        p = jnp.where(seen, jnp.exp2(scores - top[..., None]), 0)
        mixed = tuple(old * shrink[..., None] + new for old, new in zip(self.mixed, mix(p), strict=True))
        return Sums(top, self.mass * shrink + p.sum(-1), mixed)

    def finish(self) -> tuple[tuple[jax.Array, ...], jax.Array]:
        """The mean value of each query, in parts, and log2 of the sum of exp2(score)."""
        return tuple(mixed / self.mass[..., None] for mixed in self.mixed), self.top + jnp.log2(self.mass)


def merge(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What `finish` gave for n sets of keys that have none in common, [n, ..., v] and [n, ...], as it would for all of
    them; one set has the sink."""
    top = lse.max(0)
    share = jnp.exp2(lse - top)
    mass = share.sum(0)
    return (out * (share / mass)[..., None]).sum(0), top + jnp.log2(mass)


def base2(sink: jax.Array) -> jax.Array:
    """Natural logits, of which -inf is none, as what sums begin with."""
    return jnp.maximum(sink.astype(jnp.float32) * LOG2E, NONE)


def natural(lse: jax.Array) -> jax.Array:
    """The other way: what `finish` and `merge` give, -inf where there was no key."""
    return jnp.where(lse > NONE / 2, lse / LOG2E, -jnp.inf)
