"""One profile in one file: a header, the KV pages, and a SHA-256 of all of it.

    8 bytes   "TGPROF1\n"
    4 bytes   length of the header, little-endian
    header    JSON: fingerprint, tenant, profile, keys (hex), page_bytes
    pages     page_bytes for each key, in order
    32 bytes  SHA-256 of everything before

The fingerprint says which model, dtype and page layout the numbers are for. A file is written beside its place,
flushed to the disk and renamed, so a name always has a whole file or none. Whatever is wrong with one is BadProfile.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from .host_tier import Content
from .page_keys import KEY_BYTES

MAGIC = b"TGPROF1\n"
SUFFIX = ".profile"
_MAX_HEADER = 64 << 20
_LENGTH_BYTES, _SUM_BYTES = 4, 32


class BadProfile(ValueError):
    """The file cannot be used; the message says why."""


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    fingerprint: str
    tenant: str
    profile: str
    keys: tuple[str, ...]  # hex
    page_bytes: int

    @property
    def key_bytes(self) -> tuple[bytes, ...]:
        return tuple(bytes.fromhex(key) for key in self.keys)


def file_name(fingerprint: str, tenant: str, profile: str) -> str:
    """A hash: nothing that a client chose is part of a path."""
    text = json.dumps([fingerprint, tenant, profile])
    return hashlib.sha256(text.encode()).hexdigest() + SUFFIX


def write_profile(path: Path, header: Header, contents: list[Content]) -> None:
    """OSError where the disk refuses; `path` is then as it was."""
    encoded = msgspec.json.encode(header)
    digest = hashlib.sha256()
    partial = path.with_suffix(".partial")
    try:
        with partial.open("wb") as file:
            for piece in (
                MAGIC,
                len(encoded).to_bytes(_LENGTH_BYTES, "little"),
                encoded,
                *(page.tobytes() for page in contents),
            ):
                digest.update(piece)
                file.write(piece)
            file.write(digest.digest())
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def read_header(path: Path) -> Header:
    """Checked for its form and the file's size, not for its sum."""
    with path.open("rb") as file:
        return _header(file)[0]


def read_profile(path: Path, expected: Header) -> list[Content]:
    """The pages of a file that is whole and says what is expected. BadProfile, or OSError."""
    with path.open("rb") as file:
        header, start = _header(file)
        if header != expected:
            raise BadProfile("it is not the profile that it was")
        file.seek(0)
        data = file.read()
    if hashlib.sha256(data[:-_SUM_BYTES]).digest() != data[-_SUM_BYTES:]:
        raise BadProfile("its checksum is wrong")
    pages = np.frombuffer(data, np.uint8, len(header.keys) * header.page_bytes, start)
    return list(pages.reshape(len(header.keys), header.page_bytes))


def _header(file: BinaryIO) -> tuple[Header, int]:
    """With where the pages start."""
    start = file.read(len(MAGIC) + _LENGTH_BYTES)
    length = int.from_bytes(start[len(MAGIC) :], "little")
    if start[: len(MAGIC)] != MAGIC or length > _MAX_HEADER:
        raise BadProfile("it is no profile of this format")
    try:
        header = msgspec.json.decode(file.read(length), type=Header)
        keys = header.key_bytes
    except (msgspec.MsgspecError, ValueError) as error:
        raise BadProfile("its header is damaged") from error
    if header.page_bytes < 1 or not keys or any(len(key) != KEY_BYTES for key in keys):
        raise BadProfile("its header is damaged")
    first = len(start) + length
    size, wanted = os.fstat(file.fileno()).st_size, first + len(keys) * header.page_bytes + _SUM_BYTES
    if size != wanted:
        raise BadProfile(f"it has {size} bytes instead of {wanted}")
    return header, first


def _sync_directory(directory: Path) -> None:
    """The name itself outlives a power cut. Not every system lets directories be opened."""
    try:
        handle = os.open(directory, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
