"""`tidegate convert SRC DST`: a hub checkpoint into Orbax with a manifest, ready to load without dequantising again."""

import hashlib
import shutil
import sys
from pathlib import Path

import jax.numpy as jnp
from tqdm import tqdm

from .checkpoint import copy_side_files, load_hub
from .converted import DTYPES, is_converted, write_converted


def run(source: Path | str, target: Path | str, *, dtype: str | None = None, ignore: tuple[str, ...] = ()) -> int:
    """Convert, print where to, return 0. Raises CheckpointError, UnsupportedModel, ValueError, OSError.

    Everything is written to TARGET.partial, which is renamed last: a killed run leaves no half model, and a repeated
    one starts over.
    """
    src, dst = Path(source), Path(target).absolute()
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype!r} is not supported; known: {', '.join(DTYPES)}")
    if is_converted(src):
        raise ValueError(f"{src} is already converted; give the hub directory that it came from")
    if is_converted(dst):
        raise FileExistsError(f"{dst} already holds a converted model; remove it or choose another directory")
    if dst.exists() and not (dst.is_dir() and next(dst.iterdir(), None) is None):
        raise FileExistsError(f"{dst} exists and is not an empty directory; choose another one")
    with tqdm(desc="loading", unit="param", file=sys.stderr, disable=not sys.stderr.isatty()) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        model = load_hub(src, dtype=None if dtype is None else jnp.dtype(dtype), ignore=ignore, progress=progress)
    partial = dst.with_name(dst.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a conversion that was killed
    partial.mkdir(parents=True)
    copy_side_files(src, partial)
    write_converted(model, partial, _fingerprint(src))
    partial.replace(dst)
    print(f"converted {src} to {target}")  # noqa: T201
    return 0


def _fingerprint(source: Path) -> str:
    """Of names, sizes and headers: enough to tell two checkpoints apart without reading their data."""
    digest = hashlib.sha256()
    for path in sorted([*source.glob("*.safetensors"), *source.glob("*.json")]):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(1 << 16))
    return digest.hexdigest()
