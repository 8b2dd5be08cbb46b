"""Checkpoints in hub form: from a directory of safetensors to a Transformer on its devices, and back.

Tensors stream one by one: the resident peak above the model in its final layout is about twice the largest parameter.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from numpy.typing import NDArray

from kernels_pallas.dispatch import device_kind

from .arithmetic import FAST, PARTITIONED
from .audit import SCALE_SUFFIX, CheckpointError, find_problems, open_checkpoint, size_problems
from .config import ModelConfig
from .plan import ParamPlan, hub_names, mesh_problems, plan
from .safetensors_file import DTYPES, TensorInfo, aligned_empty, write_file
from .sharding import named
from .transformer import Transformer

SIDE_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
              "special_tokens_map.json", "chat_template.jinja", "template.toml")  # fmt: skip

Progress = Callable[[int, int], None]


def default_dtype(config: ModelConfig) -> np.dtype:
    """float32 on a CPU, whose narrow products are slow; else what the checkpoint holds, bfloat16 for fp8."""
    if device_kind() == "cpu" or config.stored_dtype == "float32":
        return jnp.dtype(jnp.float32)
    return jnp.dtype(jnp.bfloat16)


def dequantise(weight: NDArray[Any], scale: NDArray[Any], block: tuple[int, int], out: NDArray[Any]) -> None:
    """out = weight * scale, block by block of rows; the last block of either axis may be partial."""
    rows, columns = block
    for index, start in enumerate(range(0, weight.shape[0], rows)):
        part = weight[start : start + rows].astype(np.float32)
        part *= np.repeat(scale[index].astype(np.float32), columns)[: weight.shape[1]]
        out[start : start + rows] = part


def _read_param(param: ParamPlan, config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> NDArray[Any]:
    """The parameter on the host, in its final dtype, where a CPU device can take it over without a copy."""
    if not param.stacked and DTYPES[tensors[param.names[0]].dtype] == param.dtype:
        return tensors[param.names[0]].read()
    out = aligned_empty(param.shape, param.dtype)
    for index, name in enumerate(param.names):
        target = out[index] if param.stacked else out
        scale = tensors.get(name + SCALE_SUFFIX)
        if scale is None:
            target[...] = tensors[name].read()
        else:
            assert config.fp8_block is not None
            dequantise(tensors[name].read(), scale.read(), config.fp8_block, target)
    return out


def load_hub(
    directory: Path | str,
    *,
    dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    ignore: tuple[str, ...] = (),
    strict_mesh: bool = False,
    progress: Progress | None = None,
) -> Transformer:
    """Load a hub directory. `ignore`: glob patterns of extra tensors to leave out.

    `strict_mesh`: a dimension that the mesh does not divide is a problem instead of being replicated.
    Raises CheckpointError, UnsupportedModel, FileNotFoundError.
    """
    root = Path(directory)
    config = ModelConfig.load(root)
    tensors, problems = open_checkpoint(root)
    if oversized := size_problems(config, tensors):
        raise CheckpointError(root, problems + oversized)
    graph, params = plan(config, dtype or default_dtype(config), arithmetic=FAST if mesh is None else PARTITIONED)
    if tensors or not problems:
        problems += find_problems(config, params, tensors, ignore)
    if strict_mesh and mesh is not None:
        problems += mesh_problems(params, mesh)
    if problems:
        raise CheckpointError(root, problems)
    return build(graph, params, lambda param: _read_param(param, config, tensors), mesh=mesh, progress=progress)


def build(
    graph: nnx.GraphDef,
    params: list[ParamPlan],
    read: Callable[[ParamPlan], NDArray[Any]],
    *,
    mesh: Mesh | None = None,
    progress: Progress | None = None,
) -> Transformer:
    """Put parameters on their devices one by one and make the model of them."""
    leaves = {}
    for done, param in enumerate(params):
        where = None if mesh is None else named(mesh, param.axes, param.shape)
        array = jax.device_put(read(param), where)
        # One at a time: an earlier host copy must be gone before the next one is made.
        leaves[param.path] = nnx.Param(array.block_until_ready(), axes=param.axes)
        if progress is not None:
            progress(done + 1, len(params))
    model: Transformer = nnx.merge(graph, nnx.from_flat_state(leaves))
    return model


def save_hub(model: Transformer, hub: Mapping[str, Any], directory: Path | str, *, dtype: DTypeLike) -> None:
    """Write model.safetensors and config.json in hub form; the router and its bias stay float32."""
    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    leaves = [(tuple(path), param) for path, param in nnx.to_flat_state(nnx.state(model))]
    listing, arrays = [], []
    for path, param in leaves:
        names = hub_names(path, model.config)
        stored = np.dtype(np.float32) if "gate" in path else np.dtype(dtype)
        shape = param.shape[1:] if "experts" in path else param.shape
        listing += [(name, tuple(shape), stored) for name in names]
        arrays.append((param, stored, "experts" in path))
    (root / "config.json").write_text(json.dumps(dict(hub), indent=2) + "\n")
    write_file(root / "model.safetensors", listing, _host_tensors(arrays))


def _host_tensors(arrays: list[tuple[Any, np.dtype, bool]]) -> Iterator[NDArray[Any]]:
    for param, stored, stacked in arrays:
        host = np.asarray(param[...])
        for tensor in host if stacked else (host,):
            yield tensor.astype(stored)


def copy_side_files(source: Path, target: Path) -> None:
    """Tokenizer, templates and config travel with the weights."""
    for name in SIDE_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
