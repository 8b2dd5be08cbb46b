"""The decoder: embedding, layers, final norm, head, and V3's multi-token-prediction (MTP) layer.

Attribute names are the hub's tensor names, so that a checkpoint maps onto the tree by name. Layers are unrolled (a
scan over stacked layers copies each layer's weights at every step on XLA CPU), but equal layers are traced once: each
call goes through `_run_layer`, a jitted function whose static part is the layer's structure.

In the deterministic arithmetic (model/arithmetic.py) every step, with a cache or without, is a decode step: its tokens
are rows of one token each, padding last, that write their keys before any of them reads.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from .architecture import LayerConfig, MoeConfig, Window
from .arithmetic import FAST, Arithmetic
from .attention import LayerCache, make_attention
from .cache import PageView, Pool, cache_shape, write
from .config import ModelConfig
from .key_blocks import KeyBlocks
from .layers import Embedding, Linear, RMSNorm, SwiGLU
from .moe import MixtureOfExperts
from .rope import RopeTable, rope_table
from .token_rows import TokenRows, unpaged_view


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
        self, x: Float[Array, "b t d"], table: RopeTable, cache: LayerCache | None, arithmetic: Arithmetic
    ) -> tuple[Float[Array, "b t d"], Pool | None]:
        attended, pool = self.self_attn(self.input_layernorm(x), table, cache, arithmetic.attention_impl)
        return self._feed_forward(x + attended, arithmetic.moe_impl), pool

    def by_rows(
        self, x: Float[Array, "n 1 d"], table: RopeTable, cache: LayerCache, arithmetic: Arithmetic
    ) -> tuple[Float[Array, "n 1 d"], Pool]:
        """The same for rows of one token each, in an arithmetic's own shape. Rows past the real ones come out as 0."""
        view, count = cache.view, cache.view.length.sum()

        def project(x: jax.Array, table: RopeTable) -> tuple[Any, jax.Array]:
            return self.self_attn.project(self.input_layernorm(x), table)

        def attend(x: jax.Array, q: Any, page_table: jax.Array, positions: jax.Array) -> jax.Array:
            window = self.self_attn.config.window
            keys = KeyBlocks(pool, page_table, positions, positions[:, 0] + 1, arithmetic.key_block, window)
            return self._feed_forward(x + self.self_attn.over_blocks(q, keys), arithmetic.moe_impl)

        q, kv = arithmetic.rows(project, x, table, count=count)
        pool = write(cache.pool, view, kv)
        return arithmetic.rows(attend, x, q, view.page_table, view.positions, count=count), pool

    def _feed_forward(self, x: Float[Array, "b t d"], moe_impl: str) -> Float[Array, "b t d"]:
        h = self.post_attention_layernorm(x)
        return x + (self.mlp(h, impl=moe_impl) if isinstance(self.mlp, MixtureOfExperts) else self.mlp(h))


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
    graph: nnx.GraphDef,
    state: nnx.State,
    x: jax.Array,
    table: RopeTable,
    cache: LayerCache | None,
    arithmetic: Arithmetic,
) -> tuple[jax.Array, Pool | None]:
    layer: DecoderLayer = nnx.merge(graph, state)
    return layer(x, table, cache, arithmetic)


@partial(jax.jit, static_argnums=(0, 5))
def _run_layer_by_rows(
    graph: nnx.GraphDef, state: nnx.State, x: jax.Array, table: RopeTable, cache: LayerCache, arithmetic: Arithmetic
) -> tuple[jax.Array, Pool]:
    layer: DecoderLayer = nnx.merge(graph, state)
    return layer.by_rows(x, table, cache, arithmetic)


class Transformer(nnx.Module):
    """A DeepSeek-family language model. `arithmetic` may be set to another one as long as nothing is compiled."""

    def __init__(
        self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32, arithmetic: Arithmetic = FAST
    ) -> None:
        self.config, self.arithmetic = config, arithmetic
        dim, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = Embedding(config.vocab_size, dim, rngs=rngs, dtype=dtype)
        self.layers = nnx.List([DecoderLayer(layer, dim, eps, rngs=rngs, dtype=dtype) for layer in config.layers])
        self.norm = RMSNorm(dim, eps, dtype=dtype)
        head = partial(Linear, dim, config.vocab_size, ("vocab", "embed"), rngs=rngs, dtype=dtype)
        self.lm_head = None if config.tie_embeddings else head()
        self.mtp = nnx.List([MtpLayer(layer, dim, eps, rngs=rngs, dtype=dtype) for layer in config.mtp_layers])

    def narrow(self, window: Window) -> None:
        """Let every layer see no more than the window shows; as long as nothing is compiled."""
        self.config = self.config.windowed(window)
        for layer in (*self.layers, *self.mtp):
            layer.self_attn.config = replace(layer.self_attn.config, window=window)

    def hidden(
        self, tokens: Int[Array, "b t"], positions: Int[Array, "b t"], length: Int[Array, " b"] | None = None
    ) -> Float[Array, "b t d"]:
        """Full causal attention without a cache; after the final norm. `length`: what is beyond may be zero."""
        if self.arithmetic.deterministic:
            every = jnp.full(tokens.shape[:1], tokens.shape[1], jnp.int32)
            return self._hidden_unpaged(tokens, positions, every if length is None else length)
        x, tables = self.embed_tokens(tokens), self._tables(positions)
        for config, layer in zip(self.config.layers, self.layers, strict=True):
            x, _ = self._run(layer, x, tables[config.attention.rope], None)
        return self.norm(x)

    def hidden_paged(
        self, tokens: Int[Array, "b t"], view: PageView, cache: tuple[Pool, ...]
    ) -> tuple[Float[Array, "b t d"], tuple[Pool, ...]]:
        """A chunk (t > 1) or one token (t == 1) a row, over a paged cache; after the final norm, with the new cache."""
        if self.arithmetic.deterministic:
            return self._hidden_by_rows(tokens, view.positions, view, cache)
        x, tables = self.embed_tokens(tokens), self._tables(view.positions)
        pools: list[Pool] = []
        for config, layer, pool in zip(self.config.layers, self.layers, cache, strict=True):
            x, written = self._run(layer, x, tables[config.attention.rope], LayerCache(pool, view))
            assert written is not None
            pools.append(written)
        return self.norm(x), tuple(pools)

    def _hidden_unpaged(
        self, tokens: Int[Array, "b t"], positions: Int[Array, "b t"], length: Int[Array, " b"]
    ) -> Float[Array, "b t d"]:
        """Pages for this step alone: scoring is what prefill and decode are."""
        page_size, dtype = self.arithmetic.key_block, self.embed_tokens.weight().dtype
        view, num_pages = unpaged_view(tokens.shape, length, page_size)
        shapes = [cache_shape(layer.attention) for layer in self.config.layers]
        cache = tuple(jnp.zeros((num_pages, heads, page_size, width), dtype) for heads, width in shapes)
        return self._hidden_by_rows(tokens, positions, view, cache)[0]

    def _hidden_by_rows(
        self, tokens: Int[Array, "b t"], positions: Int[Array, "b t"], view: PageView, cache: tuple[Pool, ...]
    ) -> tuple[Float[Array, "b t d"], tuple[Pool, ...]]:
        rows = TokenRows.of(view)
        x, tables = self.embed_tokens(rows.take(tokens)), self._tables(rows.take(positions))
        pools: list[Pool] = []
        for config, layer, pool in zip(self.config.layers, self.layers, cache, strict=True):
            graph, state = nnx.split(layer)
            table, paged = tables[config.attention.rope], LayerCache(pool, rows.view)
            x, written = _run_layer_by_rows(graph, state, x, table, paged, self.arithmetic)
            pools.append(written)
        x = self.arithmetic.rows(self.norm, x, count=rows.num_real)
        return rows.put(x, tokens.shape), tuple(pools)

    def logits(self, hidden: Float[Array, "*lead d"]) -> Float[Array, "*lead v"]:
        """Float32 logits over the vocabulary."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        return self.arithmetic.rows(self._head, rows).reshape(*hidden.shape[:-1], -1)

    def _head(self, hidden: Float[Array, "n d"]) -> Float[Array, "n v"]:
        if self.lm_head is not None:
            return self.lm_head(hidden).astype(jnp.float32)
        return (hidden @ self.embed_tokens.weight().T).astype(jnp.float32)

    def mtp_paged(
        self, hidden: Float[Array, "b t d"], tokens: Int[Array, "b t"], view: PageView, pool: Pool
    ) -> tuple[Float[Array, "b t d"], Pool]:
        """The first MTP layer over its own paged cache, with the new cache; `logits` of the result are its prediction.

        `hidden` and `tokens` as in `mtp_logits`, at the view's positions. Where only the cache is used the compiler
        leaves out all but the keys and values. Always the fast arithmetic.
        """
        layer = self.mtp[0]
        table = rope_table(self.config.mtp_layers[0].attention.rope, view.positions)
        x, written = self._run(layer, layer.join(self.embed_tokens(tokens), hidden), table, LayerCache(pool, view))
        assert written is not None
        return layer.shared_head.norm(x), written

    def mtp_logits(self, hidden: Float[Array, "b t d"], tokens: Int[Array, "b t"]) -> Float[Array, "b t v"]:
        """The first MTP layer's prediction of the token after next.

        `hidden[:, i]` is the main model's state at position i (after the final norm), `tokens[:, i]` the token at
        position i + 1; the result at i is over the token at i + 2. Always the fast arithmetic: it is a guess.
        """
        layer, (b, t) = self.mtp[0], tokens.shape
        positions = jnp.broadcast_to(jnp.arange(t), (b, t))
        table = rope_table(self.config.mtp_layers[0].attention.rope, positions)
        x, _ = self._run(layer, layer.join(self.embed_tokens(tokens), hidden), table, None)
        return self.logits(layer.shared_head.norm(x))

    def _tables(self, positions: Int[Array, "b t"]) -> dict[object, RopeTable]:
        ropes = {layer.attention.rope for layer in self.config.layers}
        return {rope: self.arithmetic.rows(partial(rope_table, rope), positions) for rope in ropes}

    def _run(
        self, layer: DecoderLayer, x: jax.Array, table: RopeTable, cache: LayerCache | None
    ) -> tuple[jax.Array, Pool | None]:
        graph, state = nnx.split(layer)
        out: tuple[jax.Array, Pool | None] = _run_layer(graph, state, x, table, cache, self.arithmetic)
        return out
