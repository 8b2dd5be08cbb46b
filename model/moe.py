"""Mixture-of-experts feed-forward: the router of each published form, routed experts, one shared expert.

Routing is DeepSeekMoE's (arXiv:2401.06066): softmax or sigmoid scores, optional groups, top-k; V3's `noaux_tc` chooses
by score + bias and weighs by score (arXiv:2412.19437 section 2.1.2). The router computes in float32 in any model dtype:
a rounded score flips choices. No token is dropped.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kernels_pallas.grouped_matmul import grouped_mlp

from .architecture import MoeConfig
from .layers import JoinedLinear, StackedLinear, SwiGLU


class Router(nnx.Module):
    """Scores tokens against experts and picks top_k of them."""

    def __init__(self, config: MoeConfig, dim: int, *, rngs: nnx.Rngs) -> None:
        self.config = config
        init = jax.random.normal(rngs.params(), (config.num_experts, dim), jnp.float32) * dim**-0.5
        self.kernel = nnx.Param(init, axes=(None, "embed"))
        bias = jnp.zeros((config.num_experts,), jnp.float32)
        self.e_score_correction_bias = nnx.Param(bias, axes=(None,)) if config.selection == "noaux_tc" else None

    def weight(self) -> Float[Array, "e d"]:
        return self.kernel[...]

    def __call__(self, x: Float[Array, "n d"]) -> tuple[Int[Array, "n k"], Float[Array, "n k"]]:
        c = self.config
        logits = x.astype(jnp.float32) @ self.weight().T
        scores = jax.nn.softmax(logits) if c.scoring == "softmax" else jax.nn.sigmoid(logits)
        experts = jax.lax.top_k(self._choosable(scores), c.top_k)[1]
        weights = jnp.take_along_axis(scores, experts, axis=1)
        if c.normalise:
            weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
        return experts, weights * c.scale

    def _choosable(self, scores: Float[Array, "n e"]) -> Float[Array, "n e"]:
        """The values that top-k orders: biased for noaux_tc, with experts outside the best groups ruled out."""
        c = self.config
        choice = scores
        if self.e_score_correction_bias is not None:
            choice = scores + jax.lax.stop_gradient(self.e_score_correction_bias[...])
        if c.num_groups == 1:
            return choice
        grouped = choice.reshape(-1, c.num_groups, c.num_experts // c.num_groups)
        if c.selection == "noaux_tc":
            group_score = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(-1)
            closed = -jnp.inf  # score + bias may be negative
        else:
            group_score = grouped.max(-1)
            closed = 0.0
        best = jax.lax.top_k(group_score, c.topk_groups)[1]
        is_open = (best[:, :, None] == jnp.arange(c.num_groups)).any(1)  # [n, groups]
        return jnp.where(is_open[:, :, None], grouped, closed).reshape(choice.shape)


class Experts(nnx.Module):
    """The routed experts' weights, stacked over experts."""

    def __init__(self, config: MoeConfig, dim: int, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        num, width = config.num_experts, config.width
        self.gate_proj = StackedLinear(num, dim, width, ("experts", "ffn", "embed"), rngs=rngs, dtype=dtype)
        self.up_proj = StackedLinear(num, dim, width, ("experts", "ffn", "embed"), rngs=rngs, dtype=dtype)
        self.down_proj: StackedLinear | JoinedLinear
        self.down_proj = StackedLinear(num, width, dim, ("experts", "embed", "ffn"), rngs=rngs, dtype=dtype)


class MixtureOfExperts(nnx.Module):
    """Routed experts plus the shared expert (never scaled)."""

    def __init__(self, config: MoeConfig, dim: int, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        self.gate = Router(config, dim, rngs=rngs)
        self.experts = Experts(config, dim, rngs=rngs, dtype=dtype)
        shared = config.shared_width
        self.shared_experts = SwiGLU(dim, shared, rngs=rngs, dtype=dtype) if shared else None

    def __call__(self, x: Float[Array, "b t d"], *, impl: str) -> Float[Array, "b t d"]:
        rows = x.reshape(-1, x.shape[-1])
        chosen, weights = self.gate(rows)
        gate, up, down = self.experts.gate_proj, self.experts.up_proj, self.experts.down_proj
        joined = isinstance(down, JoinedLinear)
        routed = grouped_mlp(rows, chosen, weights, gate.weight(), up.weight(), down.weight(), impl=impl, joined=joined)
        routed = routed.reshape(x.shape)
        return routed if self.shared_experts is None else routed + self.shared_experts(x)
