"""Converted checkpoints: parameters in Orbax, beside a manifest that says what they are.

DIRECTORY holds config.json, the tokenizer's files, params/ (Orbax) and manifest.json: the format, the dtype, the
fingerprint of the source, and each parameter's shape, dtype and SHA-256. The checksums catch what shapes cannot, such
as two swapped layers. A directory without its manifest was not finished and does not load.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.typing import DTypeLike

from .arithmetic import FAST, PARTITIONED
from .audit import CheckpointError
from .config import ModelConfig
from .hub_fields import shown
from .plan import ParamPlan, mesh_problems, plan
from .sharding import named
from .transformer import Transformer

FORMAT = "tidegate-1"
DTYPES = ("float32", "bfloat16", "float16")
MANIFEST = "manifest.json"


def is_converted(directory: Path) -> bool:
    return (directory / MANIFEST).is_file()


def key(path: tuple[Any, ...]) -> str:
    """'layers.3.mlp.gate.kernel': the name of a parameter in the manifest and in Orbax."""
    return ".".join(map(str, path))


def sha256(array: jax.Array) -> str:
    """Of the bytes in C order."""
    return hashlib.sha256(np.ascontiguousarray(np.asarray(array)).view(np.uint8).data).hexdigest()


def write_converted(model: Transformer, directory: Path, source: str) -> None:
    """Write params/ and then the manifest, which makes the directory valid."""
    arrays = {key(tuple(path)): param[...] for path, param in nnx.to_flat_state(nnx.state(model))}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory.absolute() / "params", arrays)
    entries = {name: {"shape": list(a.shape), "dtype": str(a.dtype), "sha256": sha256(a)} for name, a in arrays.items()}
    manifest = {"format": FORMAT, "source": source, "params": entries}
    partial = directory / (MANIFEST + ".partial")
    partial.write_text(json.dumps(manifest, indent=1) + "\n")
    partial.replace(directory / MANIFEST)


def load_converted(
    directory: Path, *, dtype: DTypeLike | None = None, mesh: Mesh | None = None, strict_mesh: bool = False
) -> Transformer:
    """Load what write_converted wrote. `dtype` None keeps the stored one. Raises CheckpointError, UnsupportedModel."""
    config = ModelConfig.load(directory)
    entries = _entries(directory)
    stored = jnp.dtype(entries["embed_tokens.embedding"]["dtype"] if "embed_tokens.embedding" in entries else "float32")
    graph, params = plan(config, stored, arithmetic=FAST if mesh is None else PARTITIONED)
    problems = _differences(params, entries)
    if strict_mesh and mesh is not None:
        problems += mesh_problems(params, mesh)
    if problems:
        raise CheckpointError(directory, problems)
    leaves, wrong = {}, []
    for batch in _batches(params):
        for param, array in zip(batch, _restore(directory, batch, mesh), strict=True):
            if sha256(array) != entries[key(param.path)]["sha256"]:
                wrong.append(f"checksum: {key(param.path)} is not what was converted")
            leaves[param.path] = nnx.Param(_cast(array, param, dtype), axes=param.axes)
            del array  # before the next batch is read
    if wrong:
        raise CheckpointError(directory, wrong)
    model: Transformer = nnx.merge(graph, nnx.from_flat_state(leaves))
    return model


def _cast(array: jax.Array, param: ParamPlan, dtype: DTypeLike | None) -> jax.Array:
    """To the wanted dtype; what the plan keeps in float32 (the router) stays."""
    keep = dtype is None or "gate" in param.path
    return array if keep else array.astype(dtype)


def _entries(directory: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((directory / MANIFEST).read_text("utf-8"))
        found, entries = manifest["format"], dict(manifest["params"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(directory, [f"{MANIFEST} is not a manifest: {shown(error)}"]) from None
    if found != FORMAT:
        raise CheckpointError(directory, [f"{MANIFEST} has format {shown(found)}, this version reads {FORMAT!r}"])
    wrong = [
        f"{MANIFEST}: {shown(name)} lacks a shape, a dtype or a sha256" for name in entries if not _whole(entries[name])
    ]
    if wrong:
        raise CheckpointError(directory, wrong)
    return entries


def _whole(entry: Any) -> bool:
    fields = entry if isinstance(entry, dict) else {}
    shape, dtype, digest = (fields.get(name) for name in ("shape", "dtype", "sha256"))
    return isinstance(shape, list) and dtype in DTYPES and isinstance(digest, str)


def _differences(params: list[ParamPlan], entries: Mapping[str, Any]) -> list[str]:
    problems = []
    for param in params:
        entry = entries.get(key(param.path))
        if entry is None:
            problems.append(f"missing: {key(param.path)} {list(param.shape)}")
        elif entry["shape"] != list(param.shape):
            problems.append(f"shape: {key(param.path)} is {entry['shape']}, the config needs {list(param.shape)}")
        elif entry["dtype"] != str(param.dtype):
            problems.append(f"dtype: {key(param.path)} is {entry['dtype']}, not {param.dtype}")
    known = {key(param.path) for param in params}
    return problems + [f"extra: {name} belongs to no parameter of this config" for name in entries if name not in known]


def _batches(params: list[ParamPlan]) -> Iterator[list[ParamPlan]]:
    """Parameters to restore together: as many as take the bytes of the largest, which bounds the memory in between."""
    sizes = [math.prod(param.shape) * param.dtype.itemsize for param in params]
    batch: list[ParamPlan] = []
    room = largest = max(sizes)
    for param, size in zip(params, sizes, strict=True):
        if size > room:
            yield batch
            batch, room = [], largest
        batch.append(param)
        room -= size
    yield batch


def _restore(directory: Path, params: list[ParamPlan], mesh: Mesh | None) -> list[jax.Array]:
    """The arrays of `params`, on their devices. Raises CheckpointError."""
    single = SingleDeviceSharding(jax.devices()[0])

    def where(param: ParamPlan) -> NamedSharding | SingleDeviceSharding:
        return single if mesh is None else named(mesh, param.axes, param.shape)

    target = {key(p.path): jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=where(p)) for p in params}
    how = ocp.args.PyTreeRestore(
        item=target, restore_args=ocp.checkpoint_utils.construct_restore_args(target), partial_restore=True
    )
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            arrays = checkpointer.restore(directory.absolute() / "params", args=how)
    except Exception as error:  # orbax raises the bare class for data that it cannot read
        first_line = str(error).partition("\n")[0]
        raise CheckpointError(directory, [f"params: {shown(first_line, 300)}"]) from error
    return [arrays.pop(key(param.path)) for param in params]
