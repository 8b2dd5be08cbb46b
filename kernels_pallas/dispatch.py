"""Where code runs: the only place that asks what the device is.

`device_kind()` is asked at trace time; a compiled program never asks again.
"""

from typing import Literal

import jax

DeviceKind = Literal["cpu", "gpu", "tpu"]


def device_kind() -> DeviceKind:
    """The platform of the default backend."""
    backend = jax.default_backend()
    if backend == "cpu":
        return "cpu"
    return "tpu" if backend == "tpu" else "gpu"
