"""Which weights a model directory holds, without reading them all: what else was computed from them is for these alone.

The configuration and, of converted parameters, the manifest (it has every checksum); of safetensors, each file's name,
size, first and last megabyte (the header among them). A change in between that leaves the size alone goes unseen; no
tool that writes checkpoints makes one.
"""

import hashlib
from pathlib import Path

from .converted import MANIFEST, is_converted

_EDGE = 1 << 20


def fingerprint(directory: Path) -> str:
    """Hex. OSError where a file cannot be read."""
    digest = hashlib.sha256()
    digest.update((directory / "config.json").read_bytes())
    if is_converted(directory):
        digest.update((directory / MANIFEST).read_bytes())
        return digest.hexdigest()
    for path in sorted(directory.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"\n{path.name}\n{size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(_EDGE))
            file.seek(max(0, size - _EDGE))
            digest.update(file.read(_EDGE))
    return digest.hexdigest()
