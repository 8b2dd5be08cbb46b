"""Checkpoints in hub form: from a directory of safetensors to a Transformer on its devices, and back.

The parameter tree has the hub's names, so the mapping is a renaming plus stacking experts. Tensors stream one by one:
the resident peak above the model in its final layout is about twice the largest parameter. All problems of a
checkpoint are found before a byte of data is read, and reported together; nothing is guessed.
"""

import fnmatch
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from numpy.typing import NDArray

from kernels_pallas.dispatch import device_kind

from .config import ModelConfig
from .safetensors_file import TensorInfo, read_header, write_file
from .sharding import named, unshardable
from .transformer import Transformer

MAX_LINES = 40
FLOATS = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
HARMLESS = ("*.rotary_emb.inv_freq",)  # old exports store what the config says
SCALE_SUFFIX = "_scale_inv"
SIDE_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
              "special_tokens_map.json", "chat_template.jinja", "template.toml")  # fmt: skip

Progress = Callable[[int, int], None]


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; `problems` has one line for each fault."""

    def __init__(self, where: Path, problems: list[str]) -> None:
        shown = problems[:MAX_LINES]
        more = [f"... and {len(problems) - len(shown)} more"] if len(problems) > len(shown) else []
        super().__init__("\n  ".join([f"{where} cannot be loaded ({len(problems)} problems):", *shown, *more]))
        self.problems = tuple(problems)


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


def default_dtype(config: ModelConfig) -> jnp.dtype:
    """float32 on a CPU, whose narrow products are slow; else what the checkpoint holds, bfloat16 for fp8."""
    if device_kind() == "cpu" or config.stored_dtype == "float32":
        return jnp.dtype(jnp.float32)
    return jnp.dtype(jnp.bfloat16)


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


def plan(config: ModelConfig, dtype: jnp.dtype, *, moe_impl: str = "auto") -> tuple[nnx.GraphDef, list[ParamPlan]]:
    """The structure of a Transformer and its parameters' sources; nothing is allocated."""
    abstract = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0), dtype=dtype, moe_impl=moe_impl))
    graph, state = nnx.split(abstract)
    params = [
        ParamPlan(tuple(path), hub_names(tuple(path), config), param.shape, tuple(param.axes), np.dtype(param.dtype))
        for path, param in nnx.to_flat_state(state)
    ]
    return graph, params


def open_checkpoint(directory: Path) -> tuple[dict[str, TensorInfo], list[str]]:
    """All tensors of a directory (single file or sharded index) and the problems of its files."""
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        single = directory / "model.safetensors"
        if not single.is_file():
            return {}, [f"{directory} holds neither model.safetensors nor model.safetensors.index.json"]
        return read_header(single)
    try:
        mapping = json.loads(index.read_text())["weight_map"]
        shards = {str(name): str(file) for name, file in mapping.items()}
    except (ValueError, KeyError, AttributeError, TypeError):
        return {}, [f"{index.name} is not an object with a weight_map"]
    return _open_shards(directory, shards)


def _open_shards(directory: Path, shards: Mapping[str, str]) -> tuple[dict[str, TensorInfo], list[str]]:
    tensors: dict[str, TensorInfo] = {}
    problems: list[str] = []
    for file in sorted(set(shards.values())):
        path = directory / file
        if Path(file).name != file or not path.is_file():
            problems.append(f"the index names the file {file!r}, which is not in the directory")
            continue
        found, faults = read_header(path)
        problems += faults
        for name, info in found.items():
            if shards.get(name) == file:
                tensors[name] = info
            else:
                problems.append(f"{file}: tensor {name} is not listed for this file by the index")
    problems += [
        f"{file}: tensor {name} is listed by the index but not in the file"
        for name, file in shards.items()
        if name not in tensors and (directory / file).is_file()
    ]
    return tensors, problems


def find_problems(
    config: ModelConfig, params: list[ParamPlan], tensors: Mapping[str, TensorInfo], ignore: tuple[str, ...] = ()
) -> list[str]:
    """Missing, extra, shape and dtype faults, one line each."""
    problems: list[str] = []
    used: set[str] = set()
    for param in params:
        for name in param.names:
            info = tensors.get(name)
            used.update((name, name + SCALE_SUFFIX))
            if info is None:
                problems.append(f"missing: {name} {list(param.tensor_shape)}")
            else:
                problems += _tensor_problems(config, param, info, tensors)
    copies = _copies(config)
    for name in sorted(tensors.keys() - used):
        if name in copies:
            problems += _copy_problems(tensors[name], tensors.get(copies[name]))
        elif not any(fnmatch.fnmatchcase(name, pattern) for pattern in (*HARMLESS, *ignore)):
            problems.append(f"extra: {name} {list(tensors[name].shape)} belongs to no parameter of this config")
    return problems


def _tensor_problems(
    config: ModelConfig, param: ParamPlan, info: TensorInfo, tensors: Mapping[str, TensorInfo]
) -> list[str]:
    problems = []
    if info.shape != param.tensor_shape:
        problems.append(f"shape: {info.name} is {list(info.shape)}, the config needs {list(param.tensor_shape)}")
    scale = tensors.get(info.name + SCALE_SUFFIX)
    if info.dtype == "F8_E4M3":
        problems += _scale_problems(config, info, scale)
    elif scale is not None:
        problems.append(f"extra: {scale.name} scales a tensor that is {info.dtype}, not F8_E4M3")
    elif info.dtype not in _stored_floats(config):
        allowed = " or ".join(sorted(_stored_floats(config)))
        problems.append(f"dtype: {info.name} is {info.dtype}, the config's torch_dtype allows {allowed}")
    return problems


def _stored_floats(config: ModelConfig) -> set[str]:
    """What the config declares, and float32, which published checkpoints mix in for the router."""
    if config.stored_dtype is None:
        return set(FLOATS.values())
    return {FLOATS[config.stored_dtype], "F32"}


def _scale_problems(config: ModelConfig, info: TensorInfo, scale: TensorInfo | None) -> list[str]:
    if config.fp8_block is None:
        return [f"dtype: {info.name} is F8_E4M3, but the config has no fp8 quantization_config"]
    if scale is None:
        return [f"missing: {info.name}{SCALE_SUFFIX} for an F8_E4M3 tensor"]
    if len(info.shape) != 2:
        return [f"shape: {info.name} is F8_E4M3 with shape {list(info.shape)}; only matrices have block scales"]
    blocks = tuple(-(-size // block) for size, block in zip(info.shape, config.fp8_block, strict=True))
    if scale.shape != blocks:
        return [f"shape: {scale.name} is {list(scale.shape)}, blocks of {list(config.fp8_block)} need {list(blocks)}"]
    if scale.dtype not in FLOATS.values():
        return [f"dtype: {scale.name} is {scale.dtype}, not a float"]
    return []


def _copies(config: ModelConfig) -> dict[str, str]:
    """Hub tensors that repeat another: the MTP layers' embedding and head, and a head that is tied."""
    head = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
    copies = {"lm_head.weight": head} if config.tie_embeddings else {}
    for index in range(config.num_layers, config.num_layers + config.num_mtp_layers):
        copies[f"model.layers.{index}.embed_tokens.weight"] = "model.embed_tokens.weight"
        copies[f"model.layers.{index}.shared_head.head.weight"] = head
    return copies


def _copy_problems(copy: TensorInfo, original: TensorInfo | None) -> list[str]:
    """A copy must be one: with other bytes it is unclear which is meant."""
    if original is None:
        return []
    same = copy.shape == original.shape and copy.dtype == original.dtype and _same_bytes(copy, original)
    return [] if same else [f"differs: {copy.name} must repeat {original.name} and does not"]


def _same_bytes(a: TensorInfo, b: TensorInfo, chunk: int = 1 << 22) -> bool:
    with a.path.open("rb") as left, b.path.open("rb") as right:
        left.seek(a.begin)
        right.seek(b.begin)
        rest = a.end - a.begin
        while rest > 0:
            size = min(chunk, rest)
            if left.read(size) != right.read(size):
                return False
            rest -= size
    return True


def dequantise(weight: NDArray[Any], scale: NDArray[Any], block: tuple[int, int], out: NDArray[Any]) -> None:
    """out = weight * scale, block by block of rows; the last block of either axis may be partial."""
    rows, columns = block
    for index, start in enumerate(range(0, weight.shape[0], rows)):
        part = weight[start : start + rows].astype(np.float32)
        part *= np.repeat(scale[index].astype(np.float32), columns)[: weight.shape[1]]
        out[start : start + rows] = part


def _read_param(param: ParamPlan, config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> NDArray[Any]:
    """The parameter on the host, in its final dtype."""
    if len(param.names) == 1 and tensors[param.names[0]].dtype != "F8_E4M3" and not param.stacked:
        return tensors[param.names[0]].read().astype(param.dtype, copy=False)
    out = np.empty(param.shape, param.dtype)
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
    dtype: jnp.dtype | None = None,
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
    moe_impl = "auto" if mesh is None else "dense"  # the form that partitions over the expert axis
    graph, params = plan(config, dtype or default_dtype(config), moe_impl=moe_impl)
    tensors, problems = open_checkpoint(root)
    if tensors or not problems:
        problems += find_problems(config, params, tensors, ignore)
    if strict_mesh and mesh is not None:
        problems += mesh_problems(params, mesh)
    if problems:
        raise CheckpointError(root, problems)
    return build(graph, params, lambda param: _read_param(param, config, tensors), mesh=mesh, progress=progress)


def mesh_problems(params: list[ParamPlan], mesh: Mesh) -> list[str]:
    """Dimensions that a mesh axis does not divide, one line each."""
    found = ((p, unshardable(mesh, p.axes, p.shape)) for p in params)
    return [f"mesh: {'.'.join(map(str, p.path))}: {why}" for p, why in found if why]


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


def save_hub(model: Transformer, hub: Mapping[str, Any], directory: Path | str, *, dtype: jnp.dtype) -> None:
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
