"""Rotary embedding as hub configs write it: `rope_theta` + `rope_scaling`, or transformers 5's `rope_parameters`."""

from .architecture import RopeConfig
from .hub_fields import HubFields, UnsupportedModel, shown

KINDS = ("default", "linear", "llama3", "yarn")
MOST_POSITIONS = (1 << 31) - 1


def read_rope(hub: HubFields, dim: int, *, interleaved: bool) -> RopeConfig:
    """The rotary embedding of heads of `dim` rotated channels. Raises UnsupportedModel."""
    scaling = hub.group("rope_scaling") or hub.group("rope_parameters") or HubFields({})
    theta = scaling.number("rope_theta", hub.number("rope_theta", 10000.0))
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in KINDS:
        raise UnsupportedModel(f"rope_scaling type {shown(kind)} is not supported; known: {', '.join(KINDS)}")
    if theta <= 1 or dim % 2:
        raise UnsupportedModel(f"rope needs rope_theta above 1 and an even number of channels, got {theta} and {dim}")
    for part in (hub, scaling):
        if part.number("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedModel(f"partial_rotary_factor {part['partial_rotary_factor']} is not supported; only 1 is")
    if kind == "default":
        return RopeConfig(dim, theta, interleaved)
    return _scaled(hub, scaling, kind, RopeConfig(dim, theta, interleaved))


def _scaled(hub: HubFields, scaling: HubFields, kind: str, plain: RopeConfig) -> RopeConfig:
    positions = hub.count("max_position_embeddings", most=MOST_POSITIONS)
    original = scaling.count("original_max_position_embeddings", positions, most=MOST_POSITIONS)
    factor = scaling.get("attention_factor")
    low, high = (scaling.number(f"{name}_freq_factor", default) for name, default in (("low", 1.0), ("high", 4.0)))
    if kind == "llama3" and low >= high:
        raise UnsupportedModel(f"rope_scaling: low_freq_factor {low} must be below high_freq_factor {high}")
    return RopeConfig(
        dim=plain.dim,
        theta=plain.theta,
        interleaved=plain.interleaved,
        kind=kind,  # type: ignore[arg-type]  # one of KINDS: read_rope saw to it
        factor=scaling.number("factor"),
        original_max_position=original,
        low_freq_factor=low,
        high_freq_factor=high,
        beta_fast=scaling.number("beta_fast", positive=False, default=32.0) or 32.0,
        beta_slow=scaling.number("beta_slow", positive=False, default=1.0) or 1.0,
        mscale=scaling.number("mscale", 0.0, positive=False),
        mscale_all_dim=scaling.number("mscale_all_dim", 0.0, positive=False),
        attention_factor=None if factor is None else scaling.number("attention_factor"),
        truncate=scaling.flag("truncate", True),
    )
