"""Rotary scaling between GGUF and hub form: llama3's is a tensor of divisors there, whose rule is found again here."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .architecture import RopeConfig, yarn_mscale
from .config import UnsupportedModel
from .gguf_fields import GgufFields
from .rope import frequencies

LOW, HIGH = 1.0, 4.0  # low_freq_factor and high_freq_factor of every published llama3 model


def read_scaling(fields: GgufFields) -> dict[str, Any] | None:
    """rope_scaling of a hub config from the metadata; None where nothing is scaled."""
    kind = fields.text("rope.scaling.type", "linear")
    factor = fields.number("rope.scaling.factor", 1.0)
    if (old := fields.number("rope.scale_linear", 1.0)) != 1.0:  # files of 2023
        kind, factor = "linear", old
    original = fields.count("rope.scaling.original_context_length", 0)
    fast, slow = (fields.number(f"rope.scaling.yarn_beta_{k}", v) for k, v in (("fast", 32.0), ("slow", 1.0)))
    for name in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor"):
        if fields.number(name, 1.0) != 1.0:
            fields.refuse(name, "only 1 is supported")
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        fields.refuse("rope.scaling.type", "known: none, linear, yarn")
        return None
    scaling = {"rope_type": "yarn", "factor": factor, "beta_fast": fast, "beta_slow": slow}
    return scaling | ({"original_max_position_embeddings": original} if original else {})


def llama3_scaling(divisors: NDArray[np.float32], theta: float) -> dict[str, Any] | None:
    """rope_scaling of type llama3 from the divisors [dim/2] of the frequencies; None where no such rule gives them."""
    wide = divisors.astype(np.float64)
    factor = round(float(wide.max()), 4)
    if not (np.isfinite(wide).all() and wide.min() > 0 and factor > 1):
        return None
    base = theta ** -(np.arange(len(wide)) / len(wide))
    between = (wide > 1 + 1e-5) & (wide < factor * (1 - 1e-5))
    candidates = [8192]
    if between.any():  # a blended channel tells how many turns it makes within the original context
        smooth = (1 / wide[between] - 1 / factor) / (1 - 1 / factor)
        turns = LOW + smooth * (HIGH - LOW)
        candidates = [round(float(np.median(turns * 2 * math.pi / base[between])))]
    for original in candidates:
        rope = RopeConfig(2 * len(wide), theta, False, "llama3", factor, original, LOW, HIGH)
        if np.allclose(base / frequencies(rope), wide, rtol=1e-4):
            names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
            return {"rope_type": "llama3", **dict(zip(names, (factor, LOW, HIGH, original), strict=True))}
    return None


def write_scaling(rope: RopeConfig) -> tuple[dict[str, Any], NDArray[np.float32] | None]:
    """(metadata without the architecture's prefix, divisors [dim/2] or None). Raises UnsupportedModel."""
    if rope.kind == "default":
        return {}, None
    if rope.kind == "llama3":
        plain = RopeConfig(rope.dim, rope.theta, rope.interleaved)
        return {}, (frequencies(plain) / frequencies(rope)).astype(np.float32)
    keys: dict[str, Any] = {"rope.scaling.type": rope.kind, "rope.scaling.factor": rope.factor}
    if rope.kind == "yarn":
        if not rope.truncate or not math.isclose(rope.cos_sin_factor, yarn_mscale(rope.factor, 1.0)):
            raise UnsupportedModel("yarn with its own attention factor, or truncate false, has no form in GGUF")
        keys["rope.scaling.original_context_length"] = rope.original_max_position
        keys |= {"rope.scaling.yarn_beta_fast": rope.beta_fast, "rope.scaling.yarn_beta_slow": rope.beta_slow}
    return keys, None
