"""Logical axes to mesh axes, as data.

Every parameter carries the logical names of its axes; RULES says which mesh axis carries each name. A dimension that
its mesh axis does not divide is replicated, and `unshardable` names it: `check` warns, `serve` refuses.
"""

import math
from collections.abc import Iterable, Mapping

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("data", "tensor", "expert")
RULES: Mapping[str | None, str | None] = {
    "batch": "data",
    "heads": "tensor",
    "kv_heads": "tensor",
    "ffn": "tensor",
    "vocab": "tensor",
    "experts": "expert",
    "embed": None,
    "latent": None,
    None: None,
}


def parse_mesh(text: str) -> dict[str, int]:
    """'data=2,tensor=2' -> {'data': 2, 'tensor': 2}. Raises ValueError."""
    sizes: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        name, _, size = part.partition("=")
        if name not in MESH_AXES or name in sizes or not size.isdigit() or int(size) < 1:
            raise ValueError(f"mesh {text!r}: write axis=size, each of {', '.join(MESH_AXES)} at most once")
        sizes[name] = int(size)
    return sizes


def make_mesh(sizes: Mapping[str, int]) -> Mesh:
    """A mesh over the first devices, all MESH_AXES present. Raises ValueError where there are too few devices."""
    shape = tuple(sizes.get(axis, 1) for axis in MESH_AXES)
    need, devices = math.prod(shape), jax.devices()
    if need > len(devices):
        raise ValueError(
            f"the mesh {dict(sizes)} needs {need} devices, there are {len(devices)}; "
            "make it smaller, or try it with --simulate-devices"
        )
    return Mesh(np.array(devices[:need]).reshape(shape), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def spec(mesh: Mesh, axes: Iterable[str | None], shape: tuple[int, ...]) -> PartitionSpec:
    """The partition of an array; dimensions that do not divide stay whole."""
    names = [RULES[axis] for axis in axes]
    fits = [name if name and size % mesh.shape[name] == 0 else None for name, size in zip(names, shape, strict=True)]
    return PartitionSpec(*fits)


def unshardable(mesh: Mesh, axes: Iterable[str | None], shape: tuple[int, ...]) -> str | None:
    """Why a dimension is replicated although a rule wants it split, or None."""
    for axis, size in zip(axes, shape, strict=True):
        name = RULES[axis]
        if name and size % mesh.shape[name]:
            return f"its {axis} dimension of {size} is not a multiple of mesh axis {name}={mesh.shape[name]}"
    return None


def named(mesh: Mesh, axes: Iterable[str | None], shape: tuple[int, ...]) -> NamedSharding:
    return NamedSharding(mesh, spec(mesh, tuple(axes), shape))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())
