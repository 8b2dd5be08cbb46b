"""Where code runs: the only place that asks what the device is, and what kernels share that depends on the answer.

`device_kind()` is asked at trace time; a compiled program never asks again. Ops take an `impl` and ask `resolve` which
of their forms that means here; a form that is a kernel gives `pl.pallas_call` what `kernel_options` says. Kernels go
through JAX's Triton route, the one that every supported version of JAX has and that serves sm_80 and sm_90 alike: all
sizes are powers of two, and both operands of a product have one dtype.
"""

from typing import Any, Literal, cast

import jax
import jax.numpy as jnp

DeviceKind = Literal["cpu", "gpu", "tpu"]
Impl = Literal["xla", "pallas", "interpret"]


def device_kind() -> DeviceKind:
    """The platform of the default backend."""
    backend = jax.default_backend()
    if backend == "cpu":
        return "cpu"
    return "tpu" if backend == "tpu" else "gpu"


def resolve(impl: str) -> Impl:
    """What an op's `impl` means on this device: "auto" is the kernel on a GPU, and XLA's own code elsewhere.
    "interpret" runs the kernel's steps through XLA, on any device. Raises ValueError for another name."""
    if impl == "auto":
        return "pallas" if device_kind() == "gpu" else "xla"
    if impl not in ("xla", "pallas", "interpret"):
        raise ValueError(f"impl is {impl!r}; it must be 'auto', 'xla', 'pallas' or 'interpret'")
    return cast(Impl, impl)


def kernel_options(impl: Impl, *, num_warps: int, num_stages: int) -> dict[str, Any]:
    """Of `pl.pallas_call`, for "pallas" or "interpret"."""
    if impl == "interpret":
        return {"interpret": True}
    from jax.experimental.pallas import triton  # to be removed from JAX: whoever runs no kernel must not miss it

    return {"compiler_params": triton.CompilerParams(num_warps=num_warps, num_stages=num_stages)}


def dot(a: jax.Array, b: jax.Array, *, transposed: bool = False) -> jax.Array:
    """Inside a kernel: a [m, k] by b [k, n], or by b [n, k] if `transposed`, accumulated in float32 -> [m, n] f32."""
    contract = (((1,), (1 if transposed else 0,)), ((), ()))
    return jax.lax.dot_general(a, b, contract, preferred_element_type=jnp.float32)
