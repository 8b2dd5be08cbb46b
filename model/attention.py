"""Attention of every kind that a layer may have: grouped-query (llama form) and multi-head latent attention (MLA).

Each kind answers one call: x and rope tables in, output out, and, when the step has a cache, the layer's pool with
the new tokens written. Without a cache a row attends causally to itself; with one it attends to what its
pages hold, block by block (model/key_blocks.py). MLA is absorbed where that multiplies less (DeepSeek-V2,
arXiv:2405.04434 section 2.1.2) and expanded elsewhere; both give the same numbers, to rounding. Softmax and the mask
are float32. Where the device runs kernels (`impl`, kernels_pallas/dispatch.py) they take the place of the blocks, but
not of MLA's expanded form over a cache. The deterministic arithmetic calls the two halves instead: `project`, and
`over_blocks` for tokens that are rows of their own.
"""

from collections.abc import Callable
from typing import NamedTuple, TypedDict

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kernels_pallas.absorbed_matmul import from_latent, to_latent
from kernels_pallas.dispatch import resolve
from kernels_pallas.mla_decode import mla_decode
from kernels_pallas.sliding_window import paged_sliding_window, sliding_window

from .architecture import AttentionConfig, GqaConfig, MlaConfig, Window
from .cache import PageView, Pool, write
from .key_blocks import KeyBlocks, Read
from .layers import Linear, RMSNorm
from .rope import RopeTable, rotate

LATENT_NORM_EPS = 1e-6  # whatever rms_norm_eps says: the published code fixes it for the two latent norms


class LayerCache(NamedTuple):
    """One layer's pool and the view that all layers of a step share."""

    pool: Pool
    view: PageView


class _Band(TypedDict):
    """A window as the kernels take it."""

    window: int | None
    sinks: int


def _band(window: Window | None) -> _Band:
    return {"window": None, "sinks": 0} if window is None else {"window": window.size, "sinks": window.sinks}


def _over_itself(
    q: Float[Array, "b t h k"],
    k: Float[Array, "b t g k"],
    v: Float[Array, "b t g v"],
    window: Window | None,
    scale: float,
    impl: str,
) -> Float[Array, "b t h v"]:
    """Rows without a cache."""
    b, t, h, dim = q.shape
    if resolve(impl) != "xla":
        start, length = (jnp.full((b,), value, jnp.int32) for value in (0, t))
        return sliding_window(q, k, v, start, length, **_band(window), scale=scale, impl=impl)
    grouped = q.reshape(b, t, k.shape[2], -1, dim)
    scores = jnp.einsum("btgjk,bsgk->bgjts", grouped, k, preferred_element_type=jnp.float32)
    p = _causal_softmax(scores * scale, window).astype(v.dtype)
    return jnp.einsum("bgjts,bsgv->btgjv", p, v).reshape(b, t, h, -1)


def _causal_softmax(scores: Float[Array, "b *h t t"], window: Window | None) -> Float[Array, "b *h t t"]:
    """Over the keys up to the query's own place that its window shows."""
    query, key = jnp.arange(scores.shape[-2])[:, None], jnp.arange(scores.shape[-1])[None, :]
    visible = key <= query if window is None else (key <= query) & window.sees(query, key)
    return jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)


class GroupedQueryAttention(nnx.Module):
    """Heads share keys and values in groups (arXiv:2305.13245); multi-head when the counts are equal."""

    def __init__(self, config: GqaConfig, dim: int, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        self.config = config
        heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        bias = config.qkv_bias
        self.q_proj = Linear(dim, heads, ("heads", "embed"), bias=bias, rngs=rngs, dtype=dtype)
        self.k_proj = Linear(dim, kv_heads, ("kv_heads", "embed"), bias=bias, rngs=rngs, dtype=dtype)
        self.v_proj = Linear(dim, kv_heads, ("kv_heads", "embed"), bias=bias, rngs=rngs, dtype=dtype)
        self.o_proj = Linear(heads, dim, ("embed", "heads"), bias=config.o_bias, rngs=rngs, dtype=dtype)

    def __call__(
        self, x: Float[Array, "b t d"], table: RopeTable, cache: LayerCache | None, impl: str
    ) -> tuple[Float[Array, "b t d"], Pool | None]:
        c, (q, kv) = self.config, self.project(x, table)
        if cache is None:
            both = kv.reshape(*kv.shape[:2], 2, c.num_kv_heads, -1)
            mixed = _over_itself(q, both[:, :, 0], both[:, :, 1], c.window, c.scale, impl)
            return self.o_proj(mixed.reshape(*x.shape[:2], -1)), None
        pool, view = write(cache.pool, cache.view, kv), cache.view
        if resolve(impl) == "xla":
            return self.over_blocks(q, KeyBlocks.of(pool, view, c.window)), pool
        where = pool, view.page_table, view.positions[:, 0], view.length
        mixed = paged_sliding_window(q, *where, **_band(c.window), scale=c.scale, impl=impl)
        return self.o_proj(mixed.reshape(*x.shape[:2], -1)), pool

    def project(
        self, x: Float[Array, "b t d"], table: RopeTable
    ) -> tuple[Float[Array, "b t h k"], Float[Array, "b t width"]]:
        """Queries, and what the cache holds of each token: its keys, then its values."""
        c, (b, t, _) = self.config, x.shape
        q = rotate(self.q_proj(x).reshape(b, t, c.num_heads, c.head_dim), table, interleaved=c.rope.interleaved)
        k = rotate(self.k_proj(x).reshape(b, t, c.num_kv_heads, c.head_dim), table, interleaved=c.rope.interleaved)
        kv = jnp.stack([k, self.v_proj(x).reshape(k.shape)], axis=2)  # [b, t, 2, kv_heads, head_dim]
        return q, kv.reshape(b, t, -1)

    def over_blocks(self, q: Float[Array, "b t h k"], keys: KeyBlocks) -> Float[Array, "b t d"]:
        c, (b, t) = self.config, q.shape[:2]
        grouped = q.reshape(b, t, c.num_kv_heads, -1, c.head_dim)

        def split(read: Read) -> tuple[Float[Array, "b g s k"], Float[Array, "b g s k"]]:
            return read(0, c.num_kv_heads), read(c.num_kv_heads, 2 * c.num_kv_heads)

        mixed = keys.attend(grouped, split, c.scale)
        return self.o_proj(mixed.reshape(b, t, -1))


class MultiHeadLatentAttention(nnx.Module):
    """Keys and values from one low-rank latent a token, plus one rotary key that all heads share."""

    def __init__(self, config: MlaConfig, dim: int, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        self.config = c = config
        q_dim = c.num_heads * (c.nope_dim + c.rope_dim)

        def linear(in_dim: int, out_dim: int, axes: tuple[str, str], bias: bool = False) -> Linear:
            return Linear(in_dim, out_dim, axes, bias=bias, rngs=rngs, dtype=dtype)

        if c.q_lora_rank is None:
            self.q_proj = linear(dim, q_dim, ("heads", "embed"))
        else:
            self.q_a_proj = linear(dim, c.q_lora_rank, ("latent", "embed"), c.bias)
            self.q_a_layernorm = RMSNorm(c.q_lora_rank, LATENT_NORM_EPS, dtype=dtype)
            self.q_b_proj = linear(c.q_lora_rank, q_dim, ("heads", "latent"))
        self.kv_a_proj_with_mqa = linear(dim, c.kv_lora_rank + c.rope_dim, ("latent", "embed"), c.bias)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, LATENT_NORM_EPS, dtype=dtype)
        self.kv_b_proj = linear(c.kv_lora_rank, c.num_heads * (c.nope_dim + c.v_dim), ("heads", "latent"))
        self.o_proj = linear(c.num_heads * c.v_dim, dim, ("embed", "heads"), c.bias)

    def __call__(
        self, x: Float[Array, "b t d"], table: RopeTable, cache: LayerCache | None, impl: str
    ) -> tuple[Float[Array, "b t d"], Pool | None]:
        c, (q, latent) = self.config, self.project(x, table)
        if cache is None:
            mixed = _over_itself(jnp.concatenate(q, axis=-1), *self._heads(latent), c.window, c.scale, impl)
            return self.o_proj(mixed.reshape(*x.shape[:2], -1)), None
        pool, view = write(cache.pool, cache.view, latent), cache.view
        if self._absorbs(x.shape[1]) and resolve(impl) != "xla":
            return self._in_pages(q, pool, view, impl), pool
        keys = KeyBlocks.of(pool, view, c.window)
        attend = self.over_blocks if self._absorbs(x.shape[1]) else self._expanded
        return attend(q, keys), pool

    def project(
        self, x: Float[Array, "b t d"], table: RopeTable
    ) -> tuple[tuple[Float[Array, "b t h n"], Float[Array, "b t h r"]], Float[Array, "b t width"]]:
        """Queries without and with position, and what the cache holds of each token."""
        return self._queries(x, table), self._latents(x, table)

    def over_blocks(
        self, q: tuple[Float[Array, "b t h n"], Float[Array, "b t h r"]], keys: KeyBlocks
    ) -> Float[Array, "b t d"]:
        rank = self.config.kv_lora_rank

        def attend(q: Float[Array, "b t h width"]) -> Float[Array, "b t h c"]:
            one_group = q[:, :, None]
            return keys.attend(one_group, lambda read: (read(0, 1), read(0, 1)[..., :rank]), self.config.scale)[:, :, 0]

        return self._absorbed(q, attend)

    def _in_pages(
        self, q: tuple[Float[Array, "b t h n"], Float[Array, "b t h r"]], pool: Pool, view: PageView, impl: str
    ) -> Float[Array, "b t d"]:
        c = self.config

        def attend(q: Float[Array, "b t h width"]) -> Float[Array, "b t h c"]:
            where, form = (pool, view.page_table, view.positions[:, 0]), _band(c.window)
            return mla_decode(q, *where, latent=c.kv_lora_rank, scale=c.scale, length=view.length, **form, impl=impl)[0]

        return self._absorbed(q, attend)

    def _absorbed(
        self,
        q: tuple[Float[Array, "b t h n"], Float[Array, "b t h r"]],
        attend: Callable[[Float[Array, "b t h width"]], Float[Array, "b t h c"]],
    ) -> Float[Array, "b t d"]:
        """All heads share one key, the latent and the rotary part, whose latent is the value too."""
        c, (q_nope, q_rope) = self.config, q
        kv_b = self.kv_b_proj.weight().reshape(c.num_heads, -1, c.kv_lora_rank)
        mixed = attend(jnp.concatenate([to_latent(q_nope, kv_b), q_rope], axis=-1))
        return self.o_proj(from_latent(mixed, kv_b, c.v_dim).reshape(*q_nope.shape[:2], -1))

    def _expanded(
        self, q: tuple[Float[Array, "b t h n"], Float[Array, "b t h r"]], keys: KeyBlocks
    ) -> Float[Array, "b t d"]:
        """Every head has its own keys and values, made of a block's latents when the block is read."""
        joined = jnp.concatenate(q, axis=-1)

        def split(read: Read) -> tuple[Float[Array, "b h s k"], Float[Array, "b h s v"]]:
            keys, values = self._heads(read(0, 1)[:, 0])
            return keys.swapaxes(1, 2), values.swapaxes(1, 2)

        mixed = keys.attend(joined[:, :, :, None], split, self.config.scale)
        return self.o_proj(mixed.reshape(*joined.shape[:2], -1))

    def _absorbs(self, tokens: int) -> bool:
        """Whether so many queries a row multiply less with a latent as it is than it takes to expand it."""
        c = self.config
        own = c.nope_dim + c.v_dim
        return tokens * (2 * c.kv_lora_rank + c.rope_dim) < tokens * (own + c.rope_dim) + c.kv_lora_rank * own

    def _heads(self, latent: Float[Array, "b s width"]) -> tuple[Float[Array, "b s h k"], Float[Array, "b s h v"]]:
        """Each head's keys, the shared rotary part at their end, and its values."""
        c = self.config
        ckv, key = jnp.split(latent, [c.kv_lora_rank], axis=-1)
        k_nope, v = jnp.split(self.kv_b_proj(ckv).reshape(*ckv.shape[:2], c.num_heads, -1), [c.nope_dim], axis=-1)
        k_rope = jnp.broadcast_to(key[:, :, None], (*k_nope.shape[:3], c.rope_dim))
        return jnp.concatenate([k_nope, k_rope], axis=-1), v

    def _queries(
        self, x: Float[Array, "b t d"], table: RopeTable
    ) -> tuple[Float[Array, "b t h n"], Float[Array, "b t h r"]]:
        c, (b, t, _) = self.config, x.shape
        q = self.q_proj(x) if c.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        nope, rope = jnp.split(q.reshape(b, t, c.num_heads, -1), [c.nope_dim], axis=-1)
        return nope, rotate(rope, table, interleaved=c.rope.interleaved)

    def _latents(self, x: Float[Array, "b t d"], table: RopeTable) -> Float[Array, "b t width"]:
        """What the cache holds: the normed latent, then the rotated shared key."""
        latent, key = jnp.split(self.kv_a_proj_with_mqa(x), [self.config.kv_lora_rank], axis=-1)
        key = rotate(key[:, :, None, :], table, interleaved=self.config.rope.interleaved)[:, :, 0]
        return jnp.concatenate([self.kv_a_layernorm(latent), key], axis=-1)


Attention = GroupedQueryAttention | MultiHeadLatentAttention


def make_attention(config: AttentionConfig, dim: int, *, rngs: nnx.Rngs, dtype: DTypeLike) -> Attention:
    if isinstance(config, MlaConfig):
        return MultiHeadLatentAttention(config, dim, rngs=rngs, dtype=dtype)
    return GroupedQueryAttention(config, dim, rngs=rngs, dtype=dtype)
