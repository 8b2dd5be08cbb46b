"""From a hub directory to a GGUF that llama.cpp reads: the same numbers in F32, or rounded to Q8_0 as it does it."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .audit import CheckpointError, find_problems, open_checkpoint, size_problems
from .config import ModelConfig, UnsupportedModel
from .gguf_file import library
from .gguf_metadata import gguf_keys
from .gguf_names import ROPE_FREQS, TensorName, tensor_names
from .gguf_vocabulary import gguf_vocabulary
from .plan import plan
from .safetensors_file import TensorInfo

FILE_TYPES = {"f32": 0, "q8_0": 7}  # general.file_type
BLOCK = 32  # numbers of a Q8_0 block; rows that are not whole blocks stay F32

Progress = Callable[[int, int], None]


def write_gguf(
    directory: Path,
    path: Path,
    *,
    dtype: str = "f32",
    ignore: tuple[str, ...] = (),
    progress: Progress | None = None,
) -> None:
    """Write `path` anew. Vectors (norms, biases) are F32 in both dtypes.

    Raises CheckpointError with every problem, UnsupportedModel, ValueError, OSError.
    """
    package = library()
    config = ModelConfig.load(directory)
    keys, divisors = gguf_keys(config)
    if config.fp8_block is not None:
        raise UnsupportedModel("an fp8 checkpoint of this family cannot be written as GGUF")
    tensors, problems = open_checkpoint(directory)
    problems += size_problems(config, tensors) or find_problems(config, plan(config, np.float32)[1], tensors, ignore)
    vocabulary, found = gguf_vocabulary(directory, config)
    if problems + found:
        raise CheckpointError(directory, problems + found)
    general = {
        "general.type": "model",
        "general.name": directory.resolve().name,
        "general.file_type": FILE_TYPES[dtype],
        "general.quantization_version": package.GGML_QUANT_VERSION,
    }
    names = tensor_names(config)
    writer = package.GGUFWriter(path, config.model_type)
    try:
        _add_metadata(writer, general | keys | vocabulary)
        _write(writer, package, names, tensors, divisors, dtype, progress)
    finally:
        writer.close()


def _add_metadata(writer: Any, metadata: dict[str, Any]) -> None:
    """Each value as the kind that llama.cpp expects: whole numbers are uint32, others float32."""
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in metadata.items():
        adders.get(type(value), writer.add_array)(key, value)


def _write(
    writer: Any,
    package: ModuleType,
    names: list[TensorName],
    tensors: dict[str, TensorInfo],
    divisors: NDArray[np.float32] | None,
    dtype: str,
    progress: Progress | None,
) -> None:
    """The header, which lists every tensor, and then their data one by one."""
    if divisors is not None:
        writer.add_tensor_info(ROPE_FREQS, divisors.shape, divisors.dtype, divisors.nbytes)
    for name in names:
        _announce(writer, package, name, dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if divisors is not None:
        writer.write_tensor_data(divisors)
    for done, name in enumerate(names):
        array = np.ascontiguousarray(name.to_gguf(tensors[name.hub].read().astype(np.float32)))
        writer.write_tensor_data(package.quantize(array, _kind(package, name, dtype)))
        if progress is not None:
            progress(done + 1, len(names))


def _kind(package: ModuleType, name: TensorName, dtype: str) -> Any:
    rounded = dtype == "q8_0" and len(name.shape) > 1 and name.shape[-1] % BLOCK == 0
    return package.GGMLQuantizationType.Q8_0 if rounded else package.GGMLQuantizationType.F32


def _announce(writer: Any, package: ModuleType, name: TensorName, dtype: str) -> None:
    kind = _kind(package, name, dtype)
    block, size = package.GGML_QUANT_SIZES[kind]
    stored = (*name.shape[:-1], name.shape[-1] // block * size)
    if block == 1:
        writer.add_tensor_info(name.gguf, name.shape, np.dtype(np.float32), int(np.prod(stored)))
    else:
        writer.add_tensor_info(name.gguf, stored, np.dtype(np.uint8), int(np.prod(stored)), raw_dtype=kind)
