"""`tidegate convert SRC DST`: a hub checkpoint into Orbax with a manifest, ready to load without dequantising again."""

import hashlib
import shutil
import sys
from pathlib import Path

import jax.numpy as jnp
from tqdm import tqdm

from .checkpoint import copy_side_files, load_hub
from .converted import is_converted, write_converted

DTYPES = ("float32", "bfloat16")


def run(source: Path | str, target: Path | str, *, dtype: str | None = None, ignore: tuple[str, ...] = ()) -> int:
    """Convert, print where to, return 0. Raises CheckpointError, UnsupportedModel, FileExistsError, OSError."""
    src, dst = Path(source), Path(target)
    if is_converted(src):
        raise ValueError(f"{src} is already converted; give the hub directory that it came from")
    if is_converted(dst):
        raise FileExistsError(f"{dst} already holds a converted model; remove it or choose another directory")
    with tqdm(desc="loading", unit="param", file=sys.stderr, disable=not sys.stderr.isatty()) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        model = load_hub(src, dtype=None if dtype is None else jnp.dtype(dtype), ignore=ignore, progress=progress)
    shutil.rmtree(dst / "params", ignore_errors=True)  # of a conversion that was killed
    dst.mkdir(parents=True, exist_ok=True)
    copy_side_files(src, dst)
    write_converted(model, dst, _fingerprint(src))
    print(f"converted {src} to {dst}")  # noqa: T201
    return 0


def _fingerprint(source: Path) -> str:
    """Of names, sizes and headers: enough to tell two checkpoints apart without reading their data."""
    digest = hashlib.sha256()
    for path in sorted([*source.glob("*.safetensors"), *source.glob("*.json")]):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(1 << 16))
    return digest.hexdigest()
