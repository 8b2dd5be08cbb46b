"""Choosing the next token on the device: greedy, or temperature with top-k, top-p and min-p.

The key of a draw is folded from (request seed, position): never from slot, bucket or batch, so the same request draws
the same tokens whoever its neighbours are. Truncation follows the field's order: temperature, top-k, top-p (nucleus,
arXiv:1904.09751: the smallest set whose mass reaches p), min-p (arXiv:2407.01082: relative to the most likely).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

GREEDY_BELOW = 1e-5  # a temperature this small is greedy: dividing by it would overflow


class Sampling(NamedTuple):
    """Per row; see serving.batch.Batch for the values that mean "off"."""

    temperature: Float[Array, " b"]
    top_k: Int[Array, " b"]
    top_p: Float[Array, " b"]
    min_p: Float[Array, " b"]
    seed: UInt32[Array, "b 2"]


def truncate(scaled: Float[Array, "b v"], sampling: Sampling) -> Float[Array, "b v"]:
    """-inf for tokens outside top-k, the nucleus, or min_p of the best; ties at a threshold are kept."""
    ordered = -jnp.sort(-scaled, axis=-1)  # most likely first
    vocab = scaled.shape[-1]
    k = jnp.where(sampling.top_k > 0, jnp.minimum(sampling.top_k, vocab), vocab)
    kth = jnp.take_along_axis(ordered, k[:, None] - 1, axis=-1)
    ordered = jnp.where(ordered >= kth, ordered, -jnp.inf)
    p = jax.nn.softmax(ordered)
    before = jnp.cumsum(p, axis=-1) - p  # mass of strictly better ranks
    top_p = sampling.top_p[:, None]
    inside = (before < top_p) | (top_p >= 1)  # 1 is off: rounded masses may reach it early, or never
    inside &= (p >= sampling.min_p[:, None] * p[:, :1]) & (ordered > -jnp.inf)
    inside = inside.at[:, 0].set(True)
    floor = jnp.min(jnp.where(inside, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(scaled >= floor, scaled, -jnp.inf)


def _draw(logits: Float[Array, "b v"], sampling: Sampling, positions: Int[Array, " b"]) -> Int[Array, " b"]:
    scaled = _scaled(logits, sampling)
    truncates = (sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0)
    kept = jax.lax.cond(truncates.any(), truncate, lambda scaled, _: scaled, scaled, sampling)
    return jnp.argmax(kept + _noise(logits.shape[-1], sampling, positions), axis=-1).astype(jnp.int32)


def _scaled(logits: Float[Array, "b v"], sampling: Sampling) -> Float[Array, "b v"]:
    return logits / jnp.maximum(sampling.temperature, GREEDY_BELOW)[:, None]


def _noise(vocab: int, sampling: Sampling, positions: Int[Array, " b"]) -> Float[Array, "b v"]:
    def gumbel(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
        return jax.random.gumbel(key, (vocab,), jnp.float32)

    noise: Float[Array, "b v"] = jax.vmap(gumbel)(sampling.seed, positions)
    return noise


def sample(logits: Float[Array, "b v"], sampling: Sampling, positions: Int[Array, " b"]) -> Int[Array, " b"]:
    """The token for `positions` of each row. Drawing runs only where some row is not greedy, sorting only where some
    row truncates."""
    return _choose(_draw, logits, sampling, positions)


def guess(logits: Float[Array, "b v"], sampling: Sampling, positions: Int[Array, " b"]) -> Int[Array, " b"]:
    """What `sample` may well draw where its logits are like these: the same noise, without the cost of truncation."""

    def draw(logits: jax.Array, sampling: Sampling, positions: jax.Array) -> jax.Array:
        noisy = _scaled(logits, sampling) + _noise(logits.shape[-1], sampling, positions)
        return jnp.argmax(noisy, axis=-1).astype(jnp.int32)

    return _choose(draw, logits, sampling, positions)


def _choose(
    draw: Callable[..., jax.Array], logits: Float[Array, "b v"], sampling: Sampling, positions: Int[Array, " b"]
) -> Int[Array, " b"]:
    """`draw` for rows that are not greedy."""
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    warm = sampling.temperature >= GREEDY_BELOW
    drawn = jax.lax.cond(warm.any(), draw, lambda *_: greedy, logits, sampling, positions)
    return jnp.where(warm, drawn, greedy)
