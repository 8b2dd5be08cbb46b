"""The decoder: embedding, layers, final norm, head, and V3's multi-token-prediction (MTP) layer.

Attribute names are the hub's tensor names, so that a checkpoint maps onto the tree by name. Layers are unrolled (a
scan over stacked layers copies each layer's weights at every step on XLA CPU), but equal layers are traced once: each
call goes through `_run_layer`, a jitted function whose static part is the layer's structure.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from .architecture import LayerConfig, MoeConfig
from .attention import LayerCache, make_attention
from .cache import PageView, Pool
from .config import ModelConfig
from .layers import Embedding, Linear, RMSNorm, SwiGLU
from .moe import MixtureOfExperts
from .rope import RopeTable, rope_table


class DecoderLayer(nnx.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: LayerConfig, dim: int, eps: float, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        self.input_layernorm = RMSNorm(dim, eps, dtype=dtype)
        self.self_attn = make_attention(config.attention, dim, rngs=rngs, dtype=dtype)
        self.post_attention_layernorm = RMSNorm(dim, eps, dtype=dtype)
        self.mlp: SwiGLU | MixtureOfExperts
        if isinstance(config.ffn, MoeConfig):
            self.mlp = MixtureOfExperts(config.ffn, dim, rngs=rngs, dtype=dtype)
        else:
            self.mlp = SwiGLU(dim, config.ffn.width, rngs=rngs, dtype=dtype)

    def __call__(
        self, x: Float[Array, "b t d"], table: RopeTable, cache: LayerCache | None, *, moe_impl: str
    ) -> tuple[Float[Array, "b t d"], Pool | None]:
        attended, pool = self.self_attn(self.input_layernorm(x), table, cache)
        x = x + attended
        h = self.post_attention_layernorm(x)
        if isinstance(self.mlp, MixtureOfExperts):
            return x + self.mlp(h, impl=moe_impl), pool
        return x + self.mlp(h), pool


class SharedHead(nnx.Module):
    """The MTP layer's own norm; its head is the model's."""

    def __init__(self, dim: int, eps: float, *, dtype: DTypeLike) -> None:
        self.norm = RMSNorm(dim, eps, dtype=dtype)


class MtpLayer(DecoderLayer):
    """One decoder layer over the joined embedding of the next token and the hidden state (arXiv:2412.19437, 2.2)."""

    def __init__(self, config: LayerConfig, dim: int, eps: float, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        super().__init__(config, dim, eps, rngs=rngs, dtype=dtype)
        self.enorm = RMSNorm(dim, eps, dtype=dtype)
        self.hnorm = RMSNorm(dim, eps, dtype=dtype)
        self.eh_proj = Linear(2 * dim, dim, ("embed", None), rngs=rngs, dtype=dtype)
        self.shared_head = SharedHead(dim, eps, dtype=dtype)

    def join(self, embedded: Float[Array, "b t d"], hidden: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        return self.eh_proj(jnp.concatenate([self.enorm(embedded), self.hnorm(hidden)], axis=-1))


@partial(jax.jit, static_argnums=(0, 5))
def _run_layer(
    graph: nnx.GraphDef, state: nnx.State, x: jax.Array, table: RopeTable, cache: LayerCache | None, moe_impl: str
) -> tuple[jax.Array, Pool | None]:
    layer: DecoderLayer = nnx.merge(graph, state)
    return layer(x, table, cache, moe_impl=moe_impl)


class Transformer(nnx.Module):
    """A DeepSeek-family language model. `moe_impl` fixes the experts' form (kernels_pallas.grouped_matmul)."""

    def __init__(
        self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32, moe_impl: str = "auto"
    ) -> None:
        self.config, self.moe_impl = config, moe_impl
        dim, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = Embedding(config.vocab_size, dim, rngs=rngs, dtype=dtype)
        self.layers = nnx.List([DecoderLayer(layer, dim, eps, rngs=rngs, dtype=dtype) for layer in config.layers])
        self.norm = RMSNorm(dim, eps, dtype=dtype)
        head = partial(Linear, dim, config.vocab_size, ("vocab", "embed"), rngs=rngs, dtype=dtype)
        self.lm_head = None if config.tie_embeddings else head()
        self.mtp = nnx.List([MtpLayer(layer, dim, eps, rngs=rngs, dtype=dtype) for layer in config.mtp_layers])

    def hidden(self, tokens: Int[Array, "b t"], positions: Int[Array, "b t"]) -> Float[Array, "b t d"]:
        """Full causal attention without a cache; after the final norm."""
        x, tables = self.embed_tokens(tokens), self._tables(positions)
        for config, layer in zip(self.config.layers, self.layers, strict=True):
            x, _ = self._run(layer, x, tables[config.attention.rope], None)
        return self.norm(x)

    def hidden_paged(
        self, tokens: Int[Array, "b t"], view: PageView, cache: tuple[Pool, ...]
    ) -> tuple[Float[Array, "b t d"], tuple[Pool, ...]]:
        """A chunk (t > 1) or one token (t == 1) a row, over a paged cache; after the final norm, with the new cache."""
        x, tables = self.embed_tokens(tokens), self._tables(view.positions)
        pools: list[Pool] = []
        for config, layer, pool in zip(self.config.layers, self.layers, cache, strict=True):
            x, written = self._run(layer, x, tables[config.attention.rope], LayerCache(pool, view))
            assert written is not None
            pools.append(written)
        return self.norm(x), tuple(pools)

    def logits(self, hidden: Float[Array, "*lead d"]) -> Float[Array, "*lead v"]:
        """Float32 logits over the vocabulary."""
        if self.lm_head is not None:
            return self.lm_head(hidden).astype(jnp.float32)
        return (hidden @ self.embed_tokens.weight().T).astype(jnp.float32)

    def mtp_logits(self, hidden: Float[Array, "b t d"], tokens: Int[Array, "b t"]) -> Float[Array, "b t v"]:
        """The first MTP layer's prediction of the token after next.

        `hidden[:, i]` is the main model's state at position i (after the final norm), `tokens[:, i]` the token at
        position i + 1; the result at i is over the token at i + 2.
        """
        layer, (b, t) = self.mtp[0], tokens.shape
        positions = jnp.broadcast_to(jnp.arange(t), (b, t))
        table = rope_table(self.config.mtp_layers[0].attention.rope, positions)
        x, _ = self._run(layer, layer.join(self.embed_tokens(tokens), hidden), table, None)
        return self.logits(layer.shared_head.norm(x))

    def _tables(self, positions: Int[Array, "b t"]) -> dict[object, RopeTable]:
        ropes = {layer.attention.rope for layer in self.config.layers}
        return {rope: rope_table(rope, positions) for rope in ropes}

    def _run(
        self, layer: DecoderLayer, x: jax.Array, table: RopeTable, cache: LayerCache | None
    ) -> tuple[jax.Array, Pool | None]:
        graph, state = nnx.split(layer)
        out: tuple[jax.Array, Pool | None] = _run_layer(graph, state, x, table, cache, self.moe_impl)
        return out
