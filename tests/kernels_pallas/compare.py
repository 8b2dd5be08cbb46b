"""How far an array is from what it should be: absolute, relative and cosine error, at once, against float64."""

import numpy as np
from numpy.typing import ArrayLike


def assert_close(got: ArrayLike, want: ArrayLike, *, absolute: float, relative: float, cosine: float = 1e-5) -> None:
    """Every entry within absolute + relative * |want|, and the whole within `cosine` (1 - cos) of want's direction,
    which a systematic error spoils long before a single entry is out of bounds. NaN is never close."""
    got, want = np.asarray(got).astype(np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"shape {got.shape}, not {want.shape}"
    assert np.isfinite(got).all(), f"{(~np.isfinite(got)).sum()} of {got.size} entries are not finite"
    error = np.abs(got - want)
    over = error - (absolute + relative * np.abs(want))
    if error.size and over.max() > 0:
        at = np.unravel_index(over.argmax(), over.shape)
        count = (over > 0).sum()
        raise AssertionError(f"{count} of {got.size} entries are off; worst at {at}: {got[at]}, not {want[at]}")
    apart = _cosine_error(got, want)
    assert apart <= cosine, f"cosine error {apart:.3g}, over {cosine:.3g}"


def _cosine_error(got: np.ndarray, want: np.ndarray) -> float:
    norm = np.linalg.norm(got) * np.linalg.norm(want)
    return 0.0 if norm == 0 else float(1 - (got * want).sum() / norm)
