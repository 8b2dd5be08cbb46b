"""Reading and writing safetensors files, with every fault of a header named at once.

The format: 8 bytes little-endian header length, a JSON object name -> {dtype, shape, data_offsets}, then the data.
Tensors are read with plain file reads, never mapped: a mapped checkpoint counts against resident memory until the
kernel lets it go. Nothing in a header is trusted before it is checked against the file's size.
"""

import json
import math
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .hub_fields import shown

MAX_HEADER_BYTES = 40_000_000  # a hostile one takes 35 times its size to parse; published files stay below 1 MB
MAX_NAME = 256
MAX_DIMS = 8
ALIGNMENT = 64  # bytes
DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> NDArray[Any]:
    """An array that a CPU device can take over without a copy: it wants its first byte at a multiple of ALIGNMENT."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor's bytes are: [begin, end) of the file."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def read(self) -> NDArray[Any]:
        """The tensor in its stored dtype. Raises OSError where the file is shorter than it was."""
        buffer = aligned_empty((self.end - self.begin,), np.dtype(np.uint8))
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.begin)
            view, done = buffer.data, 0
            while done < len(view):
                count = file.readinto(view[done:])
                if not count:
                    raise OSError(f"{self.path}: tensor {self.name} ends after {done} of {len(view)} bytes")
                done += count
        return buffer.view(DTYPES[self.dtype]).reshape(self.shape)


def read_header(path: Path) -> tuple[dict[str, TensorInfo], list[str]]:
    """The tensors of one file, and all its problems as lines; tensors with a problem are left out."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        if len(head) < 8:
            return {}, [f"{path.name}: {size} bytes is too short for a safetensors file"]
        (length,) = struct.unpack("<Q", head)
        if length > min(MAX_HEADER_BYTES, size - 8):
            return {}, [f"{path.name}: the header claims {length} bytes, the file holds {size - 8} after its length"]
        raw = file.read(length)
    try:
        header = json.loads(raw, object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        return {}, [f"{path.name}: the header is not a JSON object: {error}"]
    if not isinstance(header, dict):
        return {}, [f"{path.name}: the header is not a JSON object"]
    return _entries(path, header, 8 + length, size)


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For json.loads: an object whose names are all different. Raises ValueError."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the name {shown(name)} occurs twice")
        found[name] = value
    return found


def printable(name: str) -> str:
    """A name as it is where it may stand in a line, else escaped and cut."""
    return name if name.isprintable() and len(name) <= MAX_NAME else shown(name)


def _entries(path: Path, header: dict[str, Any], base: int, size: int) -> tuple[dict[str, TensorInfo], list[str]]:
    tensors, problems = {}, []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            tensors[name] = _entry(path, name, entry, base, size)
        except ValueError as error:
            problems.append(f"{path.name}: tensor {printable(name)}: {error}")
    return tensors, problems or _extent_problems(path, list(tensors.values()), base, size)


def _extent_problems(path: Path, tensors: list[TensorInfo], base: int, size: int) -> list[str]:
    """Tensors that share bytes, and bytes that no tensor claims: the format has neither."""
    problems, end, last = [], base, "the header"
    for tensor in sorted((t for t in tensors if t.end > t.begin), key=lambda t: t.begin):
        if tensor.begin < end:
            problems.append(f"{path.name}: tensors {last} and {tensor.name} overlap")
        elif tensor.begin > end:
            problems.append(f"{path.name}: bytes {end} to {tensor.begin} belong to no tensor")
        if tensor.end > end:
            end, last = tensor.end, tensor.name
    if end < size:
        problems.append(f"{path.name}: bytes {end} to {size}, at its end, belong to no tensor")
    return problems


def _entry(path: Path, name: str, entry: Any, base: int, size: int) -> TensorInfo:
    if printable(name) != name:
        raise ValueError(f"its name is not a printable one of at most {MAX_NAME} characters")
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ValueError("its entry lacks dtype, shape or data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"dtype {shown(dtype)} is unknown; known: {', '.join(DTYPES)}")
    if not _naturals(shape) or len(shape) > MAX_DIMS:
        raise ValueError(f"shape {shown(shape)} is not a list of at most {MAX_DIMS} sizes")
    if not _naturals(offsets) or len(offsets) != 2:
        raise ValueError(f"data_offsets {shown(offsets)} is not a pair of sizes")
    begin, end = offsets
    needed = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != needed:
        raise ValueError(
            f"{dtype} {shown(shape)} needs {shown(needed)} bytes, its data_offsets span {shown(end - begin)}"
        )
    if base + end > size:
        raise ValueError(f"its data ends at byte {shown(base + end)}, the file at {size}")
    return TensorInfo(name, path, dtype, tuple(shape), base + begin, base + end)


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)


def write_file(
    path: Path, tensors: Iterable[tuple[str, tuple[int, ...], np.dtype]], data: Iterator[NDArray[Any]]
) -> None:
    """Write tensors one by one (`data` yields them in the order of `tensors`), to a temporary name, then rename."""
    codes, header, offset = {v: k for k, v in DTYPES.items()}, {}, 0
    for name, shape, dtype in tensors:
        size = math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": codes[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        for array in data:
            file.write(np.ascontiguousarray(array).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
