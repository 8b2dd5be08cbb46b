"""Reading and writing safetensors files, with every fault of a header named at once.

The format: 8 bytes little-endian header length, a JSON object name -> {dtype, shape, data_offsets}, then the data.
Tensors are read with plain file reads, never mapped: a mapped checkpoint counts against resident memory until the
kernel lets it go. Nothing in a header is trusted before it is checked against the file's size.
"""

import itertools
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

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
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
        header = json.loads(raw, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        return {}, [f"{path.name}: the header is not a JSON object: {error}"]
    if not isinstance(header, dict):
        return {}, [f"{path.name}: the header is not a JSON object"]
    return _entries(path, header, 8 + length, size)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):
        raise ValueError(f"the name {next(k for k in keys if keys.count(k) > 1)!r} occurs twice")
    return dict(pairs)


def _entries(path: Path, header: dict[str, Any], base: int, size: int) -> tuple[dict[str, TensorInfo], list[str]]:
    tensors, problems = {}, []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            tensors[name] = _entry(path, name, entry, base, size)
        except ValueError as error:
            problems.append(f"{path.name}: tensor {name}: {error}")
    ordered = sorted((t for t in tensors.values() if t.end > t.begin), key=lambda t: t.begin)
    for before, after in itertools.pairwise(ordered):
        if after.begin < before.end:
            problems.append(f"{path.name}: tensors {before.name} and {after.name} overlap")
    return tensors, problems


def _entry(path: Path, name: str, entry: Any, base: int, size: int) -> TensorInfo:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ValueError("its entry lacks dtype, shape or data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is unknown; known: {', '.join(DTYPES)}")
    if not _naturals(shape) or len(shape) > MAX_DIMS:
        raise ValueError(f"shape {shape!r} is not a list of at most {MAX_DIMS} sizes")
    if not _naturals(offsets) or len(offsets) != 2:
        raise ValueError(f"data_offsets {offsets!r} is not a pair of sizes")
    begin, end = offsets
    needed = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != needed:
        raise ValueError(f"{dtype} {shape} needs {needed} bytes, its data_offsets span {end - begin}")
    if base + end > size:
        raise ValueError(f"its data ends at byte {base + end}, the file at {size}")
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
