"""From a GGUF of llama or qwen2 form to a hub directory: dequantised weights, config, tokenizer, chat template."""

import fnmatch
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .audit import CheckpointError
from .config import ModelConfig, UnsupportedModel
from .gguf_file import GgufFile, open_gguf
from .gguf_metadata import hub_config
from .gguf_names import ROPE_FREQS, TensorName, tensor_names
from .gguf_tokenizer import hub_tokenizer
from .safetensors_file import write_file

DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
STORED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

Progress = Callable[[int, int], None]


def read_gguf(
    path: Path, directory: Path, *, dtype: str | None, ignore: tuple[str, ...] = (), progress: Progress | None = None
) -> None:
    """Write the model of the file `path` into `directory`, which exists.

    `dtype` None: what all matrices of the file are stored in, float32 where they are quantised or mixed.
    Raises CheckpointError with every problem, UnsupportedModel, ValueError without the package gguf, OSError.
    """
    file, problems = open_gguf(path)
    hub, found = hub_config(file, ignore)
    problems += found
    files, found = hub_tokenizer(file.metadata, hub["vocab_size"])
    problems += found
    chosen = dtype or _stored_dtype(file)
    hub |= {"torch_dtype": chosen} | (files.ids if files is not None else {})
    names = _names(hub, file, problems, ignore)
    if problems:
        raise CheckpointError(path, problems)
    _write_json(directory / "config.json", hub)
    if files is not None:
        _write_json(directory / "tokenizer.json", files.tokenizer, indent=None)
        _write_json(directory / "tokenizer_config.json", files.config)
        _write_json(directory / "generation_config.json", files.generation)
    listing = [(name.hub, name.shape, DTYPES[chosen]) for name in names]
    write_file(directory / "model.safetensors", listing, _arrays(file, names, DTYPES[chosen], progress))


def _stored_dtype(file: GgufFile) -> str:
    kinds = {tensor.type_name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return STORED.get(kinds.pop(), "float32") if len(kinds) == 1 else "float32"


def _names(hub: dict[str, Any], file: GgufFile, problems: list[str], ignore: tuple[str, ...]) -> list[TensorName]:
    """The tensors to read; what is missing, surplus or of another shape goes to `problems`."""
    try:
        names = tensor_names(ModelConfig.from_hub(hub))
    except UnsupportedModel as error:
        problems.append(str(error))
        return []
    for name in names:
        tensor = file.tensors.get(name.gguf)
        if tensor is None:
            problems.append(f"missing: {name.gguf} {list(name.shape)}")
        elif tensor.shape != name.shape:
            problems.append(f"shape: {name.gguf} is {list(tensor.shape)}, the metadata need {list(name.shape)}")
    known = {name.gguf for name in names} | {ROPE_FREQS}
    problems += [
        f"extra: {name} {list(file.tensors[name].shape)} belongs to no parameter of this architecture"
        for name in sorted(file.tensors.keys() - known)
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in ignore)
    ]
    return names


def _arrays(
    file: GgufFile, names: list[TensorName], dtype: np.dtype, progress: Progress | None
) -> Iterator[NDArray[Any]]:
    for done, name in enumerate(names):
        yield name.from_gguf(file.tensors[name.gguf].read()).astype(dtype)
        if progress is not None:
            progress(done + 1, len(names))


def _write_json(path: Path, value: Any, indent: int | None = 2) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=indent) + "\n", "utf-8")
