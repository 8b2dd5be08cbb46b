"""The paged KV cache: one pool of fixed-size pages a layer, of the kind that the layer's attention needs.

A pool is one array [num_pages, heads, page_size, width]: for grouped-query attention the heads' keys, then their
values; for MLA one head, the normed latent and the rotated shared key (kv_lora_rank + rope_dim numbers a token, nothing
else). Heads come before positions, so that attention reads each head's part of a page as the rows of its product.
Page 0 belongs to nobody: padding writes there. A PageView says where a step's rows live; `write` stores their tokens
and model/key_blocks.py reads them. The pools are donated to the step and returned from it.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from .architecture import AttentionConfig, MlaConfig
from .config import ModelConfig

Pool = Float[Array, "pages heads page width"]


def cache_shape(attention: AttentionConfig) -> tuple[int, int]:
    """Of a token in one layer: heads, and numbers in each."""
    if isinstance(attention, MlaConfig):
        return 1, attention.kv_lora_rank + attention.rope_dim
    return 2 * attention.num_kv_heads, attention.head_dim


def page_bytes(config: ModelConfig, page_size: int, dtype: DTypeLike, *, mtp: bool = False) -> int:
    """Bytes of one page over all layers that `init_cache` makes pools for."""
    return sum(heads * width for heads, width in _shapes(config, mtp)) * page_size * jnp.dtype(dtype).itemsize


def init_cache(
    config: ModelConfig, num_pages: int, page_size: int, dtype: DTypeLike, *, mtp: bool = False
) -> tuple[Pool, ...]:
    """Zeroed pools, one a layer. `mtp`: one more at the end, for the MTP layer."""
    return tuple(jnp.zeros((num_pages, heads, page_size, width), dtype) for heads, width in _shapes(config, mtp))


def _shapes(config: ModelConfig, mtp: bool) -> list[tuple[int, int]]:
    layers = (*config.layers, *config.mtp_layers[:1]) if mtp else config.layers
    return [cache_shape(layer.attention) for layer in layers]


class PageView(NamedTuple):
    """Where the rows of a step live. Token i of row r has position start[r] + i and is real where i < length[r]."""

    page_table: Int[Array, "b pages"]
    positions: Int[Array, "b t"]
    length: Int[Array, " b"]

    @property
    def valid(self) -> Bool[Array, "b t"]:
        return jnp.arange(self.positions.shape[1])[None, :] < self.length[:, None]


def write(pool: Pool, view: PageView, values: Float[Array, "b t heads_width"]) -> Pool:
    """Store each real token's values, head by head, at its position; padding goes to page 0."""
    _, heads, page_size, width = pool.shape
    page = jnp.take_along_axis(view.page_table, view.positions // page_size, axis=1, mode="clip")
    page, slot = (jnp.where(view.valid, x, 0).reshape(-1, 1) for x in (page, view.positions % page_size))
    rows = values.reshape(-1, heads, width).astype(pool.dtype)
    # XLA makes a scatter of one row a select over copies of the whole pool; of two it does not.
    if len(page) * heads == 1:
        page, slot, rows = (jnp.concatenate([x, jnp.zeros_like(x)]) for x in (page, slot, rows))
    return pool.at[page, jnp.arange(heads), slot].set(rows)
