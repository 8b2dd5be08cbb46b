"""Which parameters a model has, and which hub tensors each is made of.

The parameter tree has the hub's names, so the mapping is a renaming plus stacking experts. Nothing is allocated here.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from .arithmetic import FAST, Arithmetic
from .config import ModelConfig
from .sharding import unshardable
from .transformer import Transformer


@dataclass(frozen=True, slots=True)
class ParamPlan:
    """One parameter and the hub tensors that it is made of: one, or one per expert."""

    path: tuple[Any, ...]
    names: tuple[str, ...]
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    dtype: np.dtype

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        return self.shape[1:] if self.stacked else self.shape

    @property
    def stacked(self) -> bool:
        return "experts" in self.path


def hub_names(path: tuple[Any, ...], config: ModelConfig) -> tuple[str, ...]:
    """The hub tensors of a parameter path, in the order that they are stacked in."""
    parts = [str(part) for part in path]
    leaf = {"kernel": "weight", "scale": "weight", "embedding": "weight"}.get(parts[-1], parts[-1])
    if parts[0] == "mtp":
        parts[:2] = ["layers", str(config.num_layers + int(parts[1]))]
    prefix = [] if parts[0] == "lm_head" else ["model"]
    if "experts" not in parts:
        return (".".join([*prefix, *parts[:-1], leaf]),)
    at = parts.index("experts") + 1
    layer = config.layers[int(parts[1])] if int(parts[1]) < config.num_layers else config.mtp_layers[0]
    num_experts = getattr(layer.ffn, "num_experts", 0)
    return tuple(".".join([*prefix, *parts[:at], str(e), *parts[at:-1], leaf]) for e in range(num_experts))


def plan(
    config: ModelConfig, dtype: DTypeLike, *, arithmetic: Arithmetic = FAST
) -> tuple[nnx.GraphDef, list[ParamPlan]]:
    """The structure of a Transformer and its parameters' sources; nothing is allocated."""
    abstract = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0), dtype=dtype, arithmetic=arithmetic))
    graph, state = nnx.split(abstract)
    params = [
        ParamPlan(tuple(path), hub_names(tuple(path), config), param.shape, tuple(param.axes), np.dtype(param.dtype))
        for path, param in nnx.to_flat_state(state)
    ]
    return graph, params


def mesh_problems(params: list[ParamPlan], mesh: Mesh) -> list[str]:
    """Dimensions that a mesh axis does not divide, one line each."""
    found = ((p, unshardable(mesh, p.axes, p.shape)) for p in params)
    return [f"mesh: {'.'.join(map(str, p.path))}: {why}" for p, why in found if why]
