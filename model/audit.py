"""Every fault of a checkpoint, found before its weights are read, one line each; nothing is guessed.

Of the data only block scales are read, which are small: one that is not a number would spoil 16,384 weights unseen.
"""

import fnmatch
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from .architecture import MoeConfig
from .config import ModelConfig
from .hub_fields import shown
from .plan import ParamPlan
from .safetensors_file import TensorInfo, no_duplicates, printable, read_header

MAX_LINES = 40
FLOATS = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
HARMLESS = ("*.rotary_emb.inv_freq",)  # old exports store what the config says
SCALE_SUFFIX = "_scale_inv"


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; `problems` has one line for each fault."""

    def __init__(self, where: Path, problems: list[str]) -> None:
        shown = problems[:MAX_LINES]
        more = [f"... and {len(problems) - len(shown)} more"] if len(problems) > len(shown) else []
        super().__init__("\n  ".join([f"{where} cannot be loaded ({len(problems)} problems):", *shown, *more]))
        self.problems = tuple(problems)


def open_checkpoint(directory: Path) -> tuple[dict[str, TensorInfo], list[str]]:
    """All tensors of a directory (single file or sharded index) and the problems of its files."""
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        single = directory / "model.safetensors"
        if not single.is_file():
            return {}, [f"{directory} holds neither model.safetensors nor model.safetensors.index.json"]
        return read_header(single)
    try:
        mapping = json.loads(index.read_text("utf-8"), object_pairs_hook=no_duplicates)["weight_map"]
        shards = {printable(name): str(file) for name, file in mapping.items()}
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        return {}, [f"{index.name} is not an object with a weight_map: {shown(error)}"]
    return _open_shards(directory, shards)


def _open_shards(directory: Path, shards: Mapping[str, str]) -> tuple[dict[str, TensorInfo], list[str]]:
    tensors: dict[str, TensorInfo] = {}
    problems: list[str] = []
    for file in sorted(set(shards.values())):
        path = directory / file
        if Path(file).name != file or not path.is_file():
            problems.append(f"the index names the file {shown(file)}, which is not in the directory")
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


def size_problems(config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> list[str]:
    """A config so much larger than its files that naming each missing tensor would take minutes and help nobody."""
    layers = (*config.layers, *config.mtp_layers)
    needed = 3 * sum(layer.ffn.num_experts if isinstance(layer.ffn, MoeConfig) else 1 for layer in layers)
    if needed <= 1000 + 10 * len(tensors):
        return []
    return [f"missing: the config describes more than {needed} tensors, the files hold {len(tensors)}"]


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
    values = scale.read()
    wrong = int(np.count_nonzero(~(np.isfinite(values) & (values >= 0))))
    return [f"value: {scale.name} has {wrong} scales that are negative or not finite"] if wrong else []


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
