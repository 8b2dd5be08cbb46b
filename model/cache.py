"""The paged KV cache: one pool of fixed-size pages a layer, of the kind that the layer's attention needs.

A pool is one array [num_pages, page_size, width]: for MLA the normed latent and the rotated shared key
(kv_lora_rank + rope_dim numbers a token, nothing else), for grouped-query attention keys and values side by side.
Page 0 belongs to nobody: padding writes there. A PageView says where a step's rows live; `write` stores their tokens
and model/key_blocks.py reads them. The pools are donated to the step and returned from it.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from .architecture import AttentionConfig, MlaConfig
from .config import ModelConfig

Pool = Float[Array, "pages page width"]


def cache_width(attention: AttentionConfig) -> int:
    """Numbers per token and layer."""
    if isinstance(attention, MlaConfig):
        return attention.kv_lora_rank + attention.rope_dim
    return 2 * attention.num_kv_heads * attention.head_dim


def page_bytes(config: ModelConfig, page_size: int, dtype: DTypeLike, *, mtp: bool = False) -> int:
    """Bytes of one page over all layers that `init_cache` makes pools for."""
    return sum(_widths(config, mtp)) * page_size * jnp.dtype(dtype).itemsize


def init_cache(
    config: ModelConfig, num_pages: int, page_size: int, dtype: DTypeLike, *, mtp: bool = False
) -> tuple[Pool, ...]:
    """Zeroed pools, one a layer, [num_pages, page_size, width]. `mtp`: one more at the end, for the MTP layer."""
    return tuple(jnp.zeros((num_pages, page_size, width), dtype=dtype) for width in _widths(config, mtp))


def _widths(config: ModelConfig, mtp: bool) -> list[int]:
    layers = (*config.layers, *config.mtp_layers[:1]) if mtp else config.layers
    return [cache_width(layer.attention) for layer in layers]


class PageView(NamedTuple):
    """Where the rows of a step live. Token i of row r has position start[r] + i and is real where i < length[r]."""

    page_table: Int[Array, "b pages"]
    positions: Int[Array, "b t"]
    length: Int[Array, " b"]

    @property
    def valid(self) -> Bool[Array, "b t"]:
        return jnp.arange(self.positions.shape[1])[None, :] < self.length[:, None]


def write(pool: Pool, view: PageView, values: Float[Array, "b t width"]) -> Pool:
    """Store each real token's values at its position; padding goes to page 0."""
    num_pages, page_size, width = pool.shape
    page = jnp.take_along_axis(view.page_table, view.positions // page_size, axis=1, mode="clip")
    where = jnp.where(view.valid, page * page_size + view.positions % page_size, 0)
    where, rows = where.reshape(-1), values.reshape(-1, width).astype(pool.dtype)
    if len(where) == 1:  # XLA makes a scatter of one row a select over copies of the whole pool; of two it does not
        where, rows = jnp.pad(where, (0, 1)), jnp.pad(rows, ((0, 1), (0, 0)))
    flat = pool.reshape(num_pages * page_size, width).at[where].set(rows)
    return flat.reshape(pool.shape)
