"""Reading GGUF, llama.cpp's file format: metadata, and tensors of every type that the `gguf` package can dequantise.

The header is read here, because a length in it must not be trusted before it is held against the file's size; blocks
of quantised weights are the package's. Tensors are read with plain file reads, one at a time.
The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .audit import CheckpointError
from .hub_fields import shown
from .safetensors_file import printable

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY, FLOAT32 = 8, 9, 6
MAX_DIMS, MAX_NESTING = 4, 4
DEFAULT_ALIGNMENT = 32


def library() -> ModuleType:
    """The `gguf` package, imported when it is needed. Raises ValueError where it is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise ValueError("GGUF files need the package gguf: pip install 'tidegate[gguf]'") from error
    return gguf


def is_gguf(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: `shape` with rows first, as NumPy has it; [begin, end) are its bytes in the file."""

    name: str
    path: Path
    type_name: str
    shape: tuple[int, ...]
    begin: int
    end: int
    decode: Callable[[NDArray[np.uint8]], NDArray[np.float32]]

    def read(self) -> NDArray[np.float32]:
        """Dequantised. Raises OSError where the file is shorter than it was."""
        with self.path.open("rb") as file:
            file.seek(self.begin)
            raw = np.fromfile(file, np.uint8, self.end - self.begin)
        if len(raw) != self.end - self.begin:
            raise OSError(f"{self.path}: tensor {self.name} ends after {len(raw)} of {self.end - self.begin} bytes")
        return self.decode(raw).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class GgufFile:
    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


class _Cursor:
    """A position in the file's bytes. Every method raises ValueError where they end too early."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self.at = data, 0

    def take(self, size: int) -> bytes:
        if size > len(self._data) - self.at:
            raise ValueError(f"{size} bytes at byte {self.at} go beyond the file's end at {len(self._data)}")
        self.at += size
        return self._data[self.at - size : self.at]

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self) -> str:
        return self.take(self.number("<Q")).decode("utf-8")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            return self._array(depth + 1)
        if kind not in SCALARS:
            raise ValueError(f"value type {kind} at byte {self.at} is unknown")
        value = self.number(SCALARS[kind])
        # 1e-05 is meant where 9.999999747378752e-06 is stored: the shortest decimal of the same float32.
        return float(str(np.float32(value))) if kind == FLOAT32 else value

    def _array(self, depth: int) -> list[Any]:
        kind, count = self.number("<I"), self.number("<Q")
        if depth > MAX_NESTING:
            raise ValueError(f"arrays within arrays, {depth} deep, at byte {self.at}")
        if kind in SCALARS:
            raw = self.take(count * struct.calcsize(SCALARS[kind]))
            return [value for (value,) in struct.iter_unpack(SCALARS[kind], raw)]
        if count > len(self._data) - self.at:
            raise ValueError(f"{count} values at byte {self.at} go beyond the file's end at {len(self._data)}")
        return [self.value(kind, depth) for _ in range(count)]


def open_gguf(path: Path) -> tuple[GgufFile, list[str]]:
    """The file without its data, and its problems, one line each.

    Raises CheckpointError where it cannot be read at all, ValueError without the package gguf.
    """
    package = library()
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            metadata, listing, start = _header(_Cursor(data))
    except (ValueError, struct.error, MemoryError) as error:
        raise CheckpointError(path, [f"{path.name} is not a GGUF file that can be read: {error}"]) from None
    tensors, problems = _tensors(path, package, listing, start)
    if metadata.get("split.count", 1) not in (0, 1):
        problems.append(f"{path.name} is one of {shown(metadata['split.count'])} parts: merge them first "
                        "(llama-gguf-split --merge)")  # fmt: skip
    return GgufFile(path, metadata, tensors), problems


Listing = list[tuple[str, tuple[int, ...], int, int]]


def _header(cursor: _Cursor) -> tuple[dict[str, Any], Listing, int]:
    """(metadata, (name, shape, type, offset) of each tensor, where the data begins). Raises ValueError."""
    if cursor.take(4) != MAGIC:
        raise ValueError("its first bytes are not GGUF")
    version = cursor.number("<I")
    if version not in VERSIONS:
        raise ValueError(f"version {version} is not supported (or the file is big-endian); known: 2, 3")
    num_tensors, num_keys = cursor.number("<Q"), cursor.number("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.text()
        if key in metadata:
            raise ValueError(f"the key {shown(key)} occurs twice")
        metadata[key] = cursor.value(cursor.number("<I"))
    listing = [_entry(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment {shown(alignment)} is not a power of two")
    return metadata, listing, -(-cursor.at // alignment) * alignment


def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, num_dims = cursor.text(), cursor.number("<I")
    if not 1 <= num_dims <= MAX_DIMS or printable(name) != name:
        raise ValueError(f"tensor {printable(name)} has {num_dims} dimensions; known: 1 to {MAX_DIMS}")
    dims = [cursor.number("<Q") for _ in range(num_dims)]
    return name, tuple(reversed(dims)), cursor.number("<I"), cursor.number("<Q")


def _tensors(path: Path, package: Any, listing: Listing, start: int) -> tuple[dict[str, GgufTensor], list[str]]:
    size, tensors, problems = path.stat().st_size, {}, []
    for name, shape, kind, offset in listing:
        try:
            if name in tensors:
                raise ValueError("occurs twice")
            type_name, row, decode = _coding(package, kind, shape[-1])
            end = start + offset + math.prod(shape[:-1]) * row
            if end > size:
                raise ValueError(f"its data ends at byte {end}, the file at {size}")
            tensors[name] = GgufTensor(name, path, type_name, shape, start + offset, end, decode)
        except ValueError as error:
            problems.append(f"{path.name}: tensor {name}: {error}")
    return tensors, problems


def _coding(package: Any, kind: int, columns: int) -> tuple[str, int, Callable[..., Any]]:
    """(name of a ggml type, bytes of a row, from rows of bytes to float32). Raises ValueError."""
    try:
        ggml = package.GGMLQuantizationType(kind)
    except ValueError:
        raise ValueError(f"type {kind} is unknown to gguf {_version()}") from None
    block, size = package.GGML_QUANT_SIZES[ggml]
    try:
        package.dequantize(np.zeros((1, size), np.uint8), ggml)
    except NotImplementedError:
        raise ValueError(f"type {ggml.name} cannot be dequantised by gguf {_version()}") from None
    if columns % block:
        raise ValueError(f"rows of {columns} are not whole blocks of {block}, as {ggml.name} needs")
    row = columns // block * size
    return ggml.name, row, lambda raw: package.dequantize(raw.reshape(-1, row), ggml)


def _version() -> str:
    from importlib.metadata import version

    return version("gguf")
