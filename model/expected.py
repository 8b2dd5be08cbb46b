"""expected.npz: the reference outputs that `check` compares with, read whole and found consistent before any use."""

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

NEEDED = ("input_ids", "lengths", "logits", "logprobs", "greedy")
Arrays = Mapping[str, NDArray[Any]]


def read_expected(path: Path, vocab_size: int) -> Arrays:
    """The arrays that `check` uses. Raises ValueError with all that is wrong, FileNotFoundError."""
    try:
        with path.open("rb") as file, np.load(file) as archive:
            arrays = {name: archive[name] for name in (*NEEDED, "mtp_logits") if name in archive}
    except (ValueError, EOFError, KeyError, AttributeError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} is not a readable npz file: {error}") from None
    missing = [f"it lacks {name}" for name in NEEDED if name not in arrays]
    problems = missing or _problems(arrays, vocab_size)
    if problems:
        raise ValueError(f"{path}: {'; '.join(problems)}")
    return arrays


def _problems(arrays: Arrays, vocab_size: int) -> list[str]:
    ids, lengths, greedy = arrays["input_ids"], arrays["lengths"], arrays["greedy"]
    integers = [name for name in ("input_ids", "lengths", "greedy") if arrays[name].dtype.kind not in "iu"]
    if integers or ids.ndim != 2 or not ids.size or greedy.ndim != 2 or not greedy.size:
        return ["input_ids [b, t], lengths [b] and greedy [b, n] must be whole numbers, and not empty"]
    b, t = ids.shape
    shapes = {"lengths": (b,), "logits": (b, t, vocab_size), "logprobs": (b, t), "greedy": (b, greedy.shape[1])}
    if "mtp_logits" in arrays:
        shapes["mtp_logits"] = shapes["logits"]
    problems = [
        f"{name} is {list(arrays[name].shape)}, not {list(shape)}"
        for name, shape in shapes.items()
        if arrays[name].shape != shape
    ]
    problems += [f"{name} are not floats" for name in shapes if "log" in name and arrays[name].dtype.kind != "f"]
    if lengths.min() < 1 or lengths.max() > t:
        problems.append(f"lengths must be from 1 to {t}")
    if ids.min() < 0 or ids.max() >= vocab_size:
        problems.append(f"input_ids must be from 0 to {vocab_size - 1}")
    return problems
