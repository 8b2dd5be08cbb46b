"""`tidegate convert SRC DST`: a hub checkpoint into Orbax with a manifest, ready to load without dequantising again.

A GGUF file as SRC becomes a hub directory, and `--to gguf` makes a hub directory a GGUF file.
"""

import hashlib
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax.numpy as jnp
from tqdm import tqdm

from .checkpoint import copy_side_files, load_hub
from .converted import DTYPES, is_converted, write_converted
from .gguf_file import is_gguf
from .gguf_read import read_gguf
from .gguf_write import FILE_TYPES, write_gguf

FORMS = ("gguf",)


def run(
    source: Path | str,
    target: Path | str,
    *,
    dtype: str | None = None,
    ignore: tuple[str, ...] = (),
    to: str | None = None,
) -> int:
    """Convert, print where to, return 0. Raises CheckpointError, UnsupportedModel, ValueError, OSError.

    Everything is written to TARGET.partial, which is renamed last: a killed run leaves no half model, and a repeated
    one starts over.
    """
    src, dst = Path(source), Path(target).absolute()
    known = tuple(FILE_TYPES) if to == "gguf" else DTYPES
    if to is not None and to not in FORMS:
        raise ValueError(f"--to {to!r} is not supported; known: {', '.join(FORMS)}")
    if dtype is not None and dtype not in known:
        raise ValueError(f"--dtype {dtype!r} is not supported here; known: {', '.join(known)}")
    if is_converted(src):
        raise ValueError(f"{src} is already converted; give the hub directory that it came from")
    if to == "gguf":
        _to_file(src, dst, dtype or "f32", ignore)
    else:
        _to_directory(src, dst, dtype, ignore)
    print(f"converted {src} to {target}")  # noqa: T201
    return 0


def _to_file(src: Path, dst: Path, dtype: str, ignore: tuple[str, ...]) -> None:
    if is_gguf(src):
        raise ValueError(f"{src} is a GGUF file: convert it to a directory first, and that to GGUF")
    if dst.exists():
        raise FileExistsError(f"{dst} exists; remove it or choose another file")
    partial = dst.with_name(dst.name + ".partial")
    partial.unlink(missing_ok=True)  # of a conversion that was killed
    dst.parent.mkdir(parents=True, exist_ok=True)
    with _progress("tensor") as progress:
        write_gguf(src, partial, dtype=dtype, ignore=ignore, progress=progress)
    partial.replace(dst)


def _to_directory(src: Path, dst: Path, dtype: str | None, ignore: tuple[str, ...]) -> None:
    if is_converted(dst):
        raise FileExistsError(f"{dst} already holds a converted model; remove it or choose another directory")
    if dst.exists() and not (dst.is_dir() and next(dst.iterdir(), None) is None):
        raise FileExistsError(f"{dst} exists and is not an empty directory; choose another one")
    partial = dst.with_name(dst.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a conversion that was killed
    if is_gguf(src):
        partial.mkdir(parents=True)
        with _progress("tensor") as progress:
            read_gguf(src, partial, dtype=dtype, ignore=ignore, progress=progress)
    else:
        _to_orbax(src, partial, dtype, ignore)
    partial.replace(dst)


def _to_orbax(src: Path, partial: Path, dtype: str | None, ignore: tuple[str, ...]) -> None:
    with _progress("param") as progress:
        model = load_hub(src, dtype=None if dtype is None else jnp.dtype(dtype), ignore=ignore, progress=progress)
    partial.mkdir(parents=True)
    copy_side_files(src, partial)
    write_converted(model, partial, _fingerprint(src))


@contextmanager
def _progress(unit: str) -> Iterator[Callable[[int, int], None]]:
    """Shown on a terminal only."""
    with tqdm(desc="converting", unit=unit, file=sys.stderr, disable=not sys.stderr.isatty()) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield progress


def _fingerprint(source: Path) -> str:
    """Of names, sizes and headers: enough to tell two checkpoints apart without reading their data."""
    digest = hashlib.sha256()
    for path in sorted([*source.glob("*.safetensors"), *source.glob("*.json")]):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(1 << 16))
    return digest.hexdigest()
