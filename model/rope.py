"""Rotary position embeddings: frequencies of each scaling form, and the rotation.

RoPE: arXiv:2104.09864. YaRN: arXiv:2309.00071. The frequencies are computed in float64 on the host, once per trace.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from numpy.typing import NDArray

from .architecture import RopeConfig


def frequencies(rope: RopeConfig) -> NDArray[np.float64]:
    """Radians per position of each channel pair, [dim/2]."""
    base = rope.theta ** -(np.arange(0, rope.dim, 2, dtype=np.float64) / rope.dim)
    if rope.kind == "linear":
        return base / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, base)
    if rope.kind == "yarn":
        return _yarn(rope, base)
    return base


def _llama3(rope: RopeConfig, base: NDArray[np.float64]) -> NDArray[np.float64]:
    """Long waves are slowed by `factor`, short ones kept, those between blended."""
    turns = rope.original_max_position * base / (2 * math.pi)  # rotations within the original context
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return (1 - smooth) * base / rope.factor + smooth * base


def _yarn(rope: RopeConfig, base: NDArray[np.float64]) -> NDArray[np.float64]:
    """Interpolate slow channels, extrapolate fast ones, with a linear ramp between two correction dims."""

    def correction(rotations: float) -> float:
        return rope.dim * math.log(rope.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = correction(rope.beta_fast), correction(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(rope.dim // 2) - low) / (high - low), 0, 1)
    return base / rope.factor * ramp + base * (1 - ramp)


RopeTable = tuple[Float[Array, "b t half"], Float[Array, "b t half"]]


def rope_table(rope: RopeConfig, positions: Int[Array, "b t"]) -> RopeTable:
    """cos and sin of every position and channel pair, float32."""
    angle = positions[..., None].astype(jnp.float32) * jnp.asarray(frequencies(rope), jnp.float32)
    factor = rope.cos_sin_factor
    return jnp.cos(angle) * factor, jnp.sin(angle) * factor


def rotate(x: Float[Array, "b t h k"], table: RopeTable, *, interleaved: bool) -> Float[Array, "b t h k"]:
    """Rotate each channel pair by its position's angle; computed in float32, returned in x's dtype."""
    cos, sin = (part[:, :, None, :] for part in table)
    wide = x.astype(jnp.float32)
    if interleaved:
        first, second = wide[..., 0::2], wide[..., 1::2]
    else:
        first, second = jnp.split(wide, 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    out = jnp.stack(turned, axis=-1).reshape(x.shape) if interleaved else jnp.concatenate(turned, axis=-1)
    return out.astype(x.dtype)
