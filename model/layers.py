"""The small modules that every architecture shares: Linear, StackedLinear, JoinedLinear, Embedding, RMSNorm, SwiGLU.

Parameters keep the hub's layout ([out, in]) and carry the logical names of their axes in `axes`, which
model/sharding.py maps to mesh axes. Quantisation replaces a Linear by one whose `weight()` differs: code that uses a
weight, sliced, reshaped or absorbed, always asks `weight()`.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kernels_pallas.skinny_matmul import linear

Axes = tuple[str | None, ...]


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: DTypeLike, std: float) -> jax.Array:
    return (jax.random.normal(rngs.params(), shape, jnp.float32) * std).astype(dtype)


class Linear(nnx.Module):
    """y = x W^T (+ b), W [out, in]."""

    def __init__(
        self, in_dim: int, out_dim: int, axes: Axes, *, bias: bool = False, rngs: nnx.Rngs, dtype: DTypeLike
    ) -> None:
        self.kernel = nnx.Param(_normal(rngs, (out_dim, in_dim), dtype, in_dim**-0.5), axes=axes)
        self.bias = nnx.Param(jnp.zeros((out_dim,), dtype), axes=axes[:1]) if bias else None

    def weight(self) -> Float[Array, "out in"]:
        return self.kernel[...]

    def __call__(self, x: Float[Array, "*lead in"]) -> Float[Array, "*lead out"]:
        y = linear(x, self.weight())
        return y if self.bias is None else y + self.bias[...]


class StackedLinear(nnx.Module):
    """The same product for each expert, W [experts, out, in]."""

    def __init__(self, num: int, in_dim: int, out_dim: int, axes: Axes, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        self.kernel = nnx.Param(_normal(rngs, (num, out_dim, in_dim), dtype, in_dim**-0.5), axes=axes)

    def weight(self) -> Float[Array, "e out in"]:
        return self.kernel[...]


class JoinedLinear(nnx.Module):
    """A StackedLinear whose experts lie side by side, W [out, experts, in]: see model/layout.py."""

    def __init__(self, stacked: StackedLinear) -> None:
        self.kernel = nnx.Param(jnp.swapaxes(stacked.weight(), 0, 1))

    def weight(self) -> Float[Array, "out e in"]:
        return self.kernel[...]


class Embedding(nnx.Module):
    """Token vectors [vocab, hidden]."""

    def __init__(self, vocab: int, dim: int, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        self.embedding = nnx.Param(_normal(rngs, (vocab, dim), dtype, 0.02), axes=("vocab", "embed"))

    def weight(self) -> Float[Array, "v d"]:
        return self.embedding[...]

    def __call__(self, tokens: Int[Array, "b t"]) -> Float[Array, "b t d"]:
        return self.embedding[...][tokens]


class RMSNorm(nnx.Module):
    """w * x / sqrt(mean(x^2) + eps), computed in float32 (arXiv:1910.07467)."""

    def __init__(self, dim: int, eps: float, *, dtype: DTypeLike) -> None:
        self.scale = nnx.Param(jnp.ones((dim,), dtype), axes=(None,))
        self.eps = eps

    def __call__(self, x: Float[Array, "*lead d"]) -> Float[Array, "*lead d"]:
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        normed = wide * jax.lax.rsqrt(mean_square + self.eps) * self.scale[...].astype(jnp.float32)
        return normed.astype(x.dtype)


class SwiGLU(nnx.Module):
    """down(silu(gate x) * up x) (arXiv:2002.05202)."""

    def __init__(self, dim: int, width: int, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        self.gate_proj = Linear(dim, width, ("ffn", "embed"), rngs=rngs, dtype=dtype)
        self.up_proj = Linear(dim, width, ("ffn", "embed"), rngs=rngs, dtype=dtype)
        self.down_proj = Linear(width, dim, ("embed", "ffn"), rngs=rngs, dtype=dtype)

    def __call__(self, x: Float[Array, "*lead d"]) -> Float[Array, "*lead d"]:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))
