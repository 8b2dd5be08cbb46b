"""Decode attention of absorbed MLA over the paged latent cache: all heads share one key, whose latent is the value too.

DeepSeek-V2, arXiv:2405.04434 section 2.1.2: with W_UK absorbed into the query and W_UV into the output, head h of the
query at position p attends over what the cache holds of each token s, a latent c_s and a rotary key r_s:
    score[h, s] = scale * (q_c[h] c_s + q_r[h] r_s),   out[h] = sum_s softmax_s(score[h, s]) c_s,   lse[h] = log sum_s
exp(score[h, s]), over the keys s <= p that the row's page table leads to. A window with sinks (arXiv:2309.17453) or a
list of key blocks leaves fewer of them. For the few queries of a decode step; a prompt multiplies less with expanded
heads (kernels_pallas/sliding_window.py). It has no gradient.

The kernel is a flash decoding: the keys of a row that are to be read, numbered from 0 on, are dealt out to `splits`
programs, each of which keeps an online softmax (arXiv:1805.02867) of a tile of queries over tiles of keys, gathered
position by position, and `merge` puts the splits together. So pages and key blocks may be of any size, heads and t of
any number, and a key that no query of the row sees is not read: it may be NaN, and its page anybody's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from operator import add
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .band import Band
from .dispatch import Impl, dot, kernel_options, resolve
from .online_softmax import LOG2E, NONE, Sums, merge, natural
from .tiles import Ref, count, load, load_rows, power_of_two, split, store

XLA_KEYS = 64  # at a time
_product = partial(jnp.einsum, preferred_element_type=jnp.float32)


def mla_decode_reference(
    q: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    start: jax.Array,
    *,
    latent: int,
    scale: float,
    length: jax.Array | None = None,
    window: int | None = None,
    sinks: int = 0,
    blocks: jax.Array | None = None,
    count: jax.Array | None = None,
    block_size: int = 1,
) -> tuple[jax.Array, jax.Array]:
    held = pool[page_table, 0].reshape(len(q), -1, q.shape[-1]).astype(jnp.float32)  # [b, s, width]
    query, key = start[:, None, None] + jnp.arange(q.shape[1])[:, None], jnp.arange(held.shape[1])
    end = start + (q.shape[1] if length is None else length)
    seen = Band(window, sinks).sees(query, key) & (key < end[:, None, None])  # [b, t, s]
    if blocks is not None and count is not None:
        named = jnp.arange(blocks.shape[1]) < count[:, None]
        listed = (blocks[:, :, None] == key // block_size) & named[:, :, None]
        seen = seen & listed.any(1)[:, None]
    held = jnp.where(seen.any(1)[:, :, None], held, 0)  # 0 * NaN is NaN
    scores = jnp.einsum("bthk,bsk->bths", q.astype(jnp.float32), held) * scale
    scores = jnp.where(seen[:, :, None], scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    p = jnp.where(seen[:, :, None], jnp.exp(scores - lse[..., None]), 0)
    return jnp.einsum("bths,bsc->bthc", p, held[..., :latent]).astype(q.dtype), lse


@dataclass(frozen=True, slots=True)
class _Keys:
    """Which positions the queries from `start` on read of a row whose keys end before `end`, and in which order: the
    sinks and what follows the last query's window, or what a list of blocks names, or all. A number, from 0 on, is a
    place in that order. Of one row or of many."""

    page_size: int
    band: Band
    block_size: int | None  # None: there is no list

    def total(self, start: jax.Array, end: jax.Array, listed: jax.Array) -> jax.Array:
        if self.block_size is not None:
            return listed * self.block_size
        if self.band.window is None:
            return end
        return jnp.clip(end, 0, self.band.sinks) + jnp.maximum(end - self._after_sinks(start, self.band.window), 0)

    def position(self, number: jax.Array, start: jax.Array, block: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """`block` looks up the row's list."""
        if self.block_size is not None:
            block_size = jnp.int32(self.block_size)
            return block(jax.lax.div(number, block_size)) * block_size + jax.lax.rem(number, block_size)
        if self.band.window is None:
            return number
        sinks = self.band.sinks
        return jnp.where(number < sinks, number, number - sinks + self._after_sinks(start, self.band.window))

    def held(self, at: jax.Array, start: jax.Array, end: jax.Array) -> jax.Array:
        """Whether a position is the row's own, and one that any of its queries may see."""
        return (at >= 0) & (at < end) & self.band.keeps(start, at)

    def place(self, at: jax.Array, page: Callable[[jax.Array], jax.Array]) -> tuple[jax.Array, jax.Array]:
        """The page, which `page` looks up in the row's table, and where in it."""
        return page(jax.lax.div(at, jnp.int32(self.page_size))), jax.lax.rem(at, jnp.int32(self.page_size))

    def _after_sinks(self, start: jax.Array, window: int) -> jax.Array:
        return jnp.maximum(start - window + 1, self.band.sinks)


class _Rows(NamedTuple):
    """Of each row: pages, where its queries begin, where its keys end, and its list of blocks, of `listed` entries."""

    page_table: jax.Array  # [b, pages]
    start: jax.Array  # [b]
    end: jax.Array  # [b]
    blocks: jax.Array  # [b, n]
    listed: jax.Array  # [b]


def _xla(
    q: jax.Array, pool: jax.Array, rows: _Rows, keys: _Keys, latent: int, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Tile by tile of all rows' keys, up to the last of the row that has most."""
    start, end = rows.start[:, None], rows.end[:, None]
    total = keys.total(rows.start, rows.end, rows.listed)
    query = (start + jnp.arange(q.shape[1]))[:, :, None, None]
    flat = pool.reshape(-1, pool.shape[-1])
    blocks, pages = (partial(jnp.take_along_axis, x, axis=1, mode="clip") for x in (rows.blocks, rows.page_table))

    def step(tile: jax.Array, sums: Sums) -> Sums:
        number = jnp.broadcast_to(tile * XLA_KEYS + jnp.arange(XLA_KEYS), (len(q), XLA_KEYS))
        at = keys.position(number, start, blocks)
        held = (number < total[:, None]) & keys.held(at, start, end)  # [b, s]
        page, slot = keys.place(at, pages)
        found = jnp.where(held[..., None], flat[page * keys.page_size + slot], 0).astype(q.dtype)
        seen = held[:, None, None] & keys.band.sees(query, at[:, None, None])  # [b, t, 1, s]
        scores = _product("bthk,bsk->bths", q, found) * (scale * LOG2E)
        return sums.add(scores, seen, lambda p: (_product("bths,bsc->bthc", p.astype(q.dtype), found[..., :latent]),))

    sums = Sums.begin(jnp.full(q.shape[:3], NONE), (latent,))
    (out,), lse = jax.lax.fori_loop(0, pl.cdiv(total.max(), XLA_KEYS), step, sums).finish()
    return out.astype(q.dtype), natural(lse)


class _Plan(NamedTuple):
    """How the kernel cuts its work up."""

    queries: int  # of a row, heads and all, in a tile
    keys: int  # in a tile
    splits: int
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, batch: int, queries: int, positions: int, item_bytes: int) -> "_Plan":
        """A tile's queries are in shared memory, and so are num_stages tiles of keys. Splits that fill a GPU of some
        130 processors twice, none of them of less than 128 keys of the longest row that the table has room for."""
        tile = min(power_of_two(queries), 128 // item_bytes)
        others = batch * pl.cdiv(queries, tile)
        splits = min(pl.cdiv(264, max(others, 1)), pl.cdiv(positions, 128))
        return cls(tile, 64 // item_bytes, max(splits, 1), num_warps=4 if tile <= 16 else 8, num_stages=2)


def _kernel(
    table_ref: Ref,
    start_ref: Ref,
    end_ref: Ref,
    blocks_ref: Ref,
    listed_ref: Ref,
    q_ref: Ref,
    pool_ref: Ref,
    out_ref: Ref,
    lse_ref: Ref,
    *,
    keys: _Keys,
    plan: _Plan,
    heads: int,
    scale: float,
) -> None:
    """q_ref [b, m, width] with m = t * heads, pool_ref [pages, page_size, width], out_ref [splits, b, m, latent], lse
    to base 2. A value is what a key's parts hold of columns below `latent`; what they hold beyond is not stored."""
    piece, row = pl.program_id(1), pl.program_id(2)
    start, end = start_ref[row], end_ref[row]
    total = keys.total(start, end, listed_ref[row])
    m = count(plan.queries, pl.program_id(0) * plan.queries)
    there = m < q_ref.shape[1]
    query = (start + jax.lax.div(m, jnp.int32(heads)))[:, None]
    q = load_rows(q_ref, row, m, mask=there)
    value_parts = [p for p in split(q_ref.shape[2]) if p.start < out_ref.shape[3]]

    def step(tile: jax.Array, sums: Sums) -> Sums:
        number = count(plan.keys, tile * plan.keys)
        at = keys.position(number, start, lambda i: load(blocks_ref, row, i, mask=number < total))
        held = (number < total) & keys.held(at, start, end)
        page, slot = keys.place(at, lambda i: load(table_ref, row, i, mask=held))
        found = [x.astype(q_ref.dtype) for x in load_rows(pool_ref, page, slot, mask=held)]
        scores = reduce(add, (dot(a, b, transposed=True) for a, b in zip(q, found, strict=True))) * (scale * LOG2E)
        seen = held[None] & keys.band.sees(query, at[None])
        return sums.add(scores, seen, lambda p: tuple(dot(p.astype(x.dtype), x) for x in found[: len(value_parts)]))

    tiles = pl.cdiv(total, plan.keys)
    share = pl.cdiv(tiles, plan.splits)
    sums = Sums.begin(jnp.full((plan.queries,), NONE), tuple(p.size for p in value_parts))
    out, lse = jax.lax.fori_loop(piece * share, jnp.minimum(piece * share + share, tiles), step, sums).finish()
    store(lse_ref, piece, row, m, value=lse, mask=there)
    for columns, values in zip(value_parts, out, strict=True):
        inside = columns._replace(width=out_ref.shape[3])
        store(out_ref, piece, row, m[:, None], columns.columns, value=values, mask=inside.mask(there))


def _pallas(
    q: jax.Array, pool: jax.Array, rows: _Rows, keys: _Keys, latent: int, scale: float, impl: Impl
) -> tuple[jax.Array, jax.Array]:
    b, t, heads, width = q.shape
    pages = rows.page_table.shape[1] * keys.page_size
    most = pages if keys.block_size is None else rows.blocks.shape[1] * keys.block_size
    if keys.band.window is not None:
        most = min(most, keys.band.sinks + keys.band.window + t - 1)
    plan = _Plan.of(b, t * heads, most, max(q.dtype.itemsize, pool.dtype.itemsize))
    grid = pl.cdiv(t * heads, plan.queries), plan.splits, b
    pieces = (plan.splits, b, t * heads)
    dtype = q.dtype if plan.splits == 1 else jnp.float32
    outs, lses = pl.pallas_call(
        partial(_kernel, keys=keys, plan=plan, heads=heads, scale=scale),
        grid=grid,
        out_shape=(jax.ShapeDtypeStruct((*pieces, latent), dtype), jax.ShapeDtypeStruct(pieces, jnp.float32)),
        name="mla_decode",
        **kernel_options(impl, num_warps=plan.num_warps, num_stages=plan.num_stages),
    )(*rows, q.reshape(b, t * heads, width), pool.reshape(-1, keys.page_size, width))
    out, lse = (outs[0], lses[0]) if plan.splits == 1 else merge(outs, lses)
    return out.astype(q.dtype).reshape(b, t, heads, latent), natural(lse).reshape(b, t, heads)


def mla_decode(
    q: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    start: jax.Array,
    *,
    latent: int,
    scale: float,
    length: jax.Array | None = None,
    window: int | None = None,
    sinks: int = 0,
    blocks: jax.Array | None = None,
    count: jax.Array | None = None,
    block_size: int = 1,
    impl: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """q [b, t, h, latent + rotary], pool [pages, 1, page_size, latent + rotary] as model/cache.py has it, page_table
    [b, pages of a row] int32, start [b] int32 -> out [b, t, h, latent] in q's dtype and lse [b, t, h] f32, by which
    results over sets of keys that have none in common merge (online_softmax.merge, to base 2).

    Query i of row r is at position start[r] + i and sees the row's keys up to its own position. Of row r's t tokens
    only the first length[r] ([b] int32; None: all) are in the cache: what lies behind them is nobody's. `window` and
    `sinks`: of those keys it sees the `window` last and the `sinks` first positions. `blocks` [b, n] and `count` [b],
    int32: it sees only those in the first count[r] of the listed blocks of `block_size` positions, block k from k *
    block_size on, in any order; one that is listed twice counts once. Sizes of pages and blocks need have nothing in
    common. A query that sees no key has out 0 and lse -inf. Pools are read in their own dtype and multiplied in q's,
    with sums in f32. ValueError: shapes or an argument without its fellow; `impl`, see `dispatch.resolve`."""
    form = resolve(impl)
    _check(q, pool, latent, blocks, count, block_size)
    end = jnp.minimum(start + (q.shape[1] if length is None else length), page_table.shape[1] * pool.shape[2])
    keys = _Keys(pool.shape[2], Band(window, sinks), None if blocks is None else block_size)
    if blocks is None or count is None:
        blocks, count = jnp.zeros((len(q), 1), jnp.int32), jnp.zeros((len(q),), jnp.int32)
    else:
        blocks, count = _each_once(blocks, count), jnp.minimum(count, blocks.shape[1])
    rows = _Rows(page_table, start, end, blocks, count)
    if form == "xla":
        return _xla(q, pool, rows, keys, latent, scale)
    return _pallas(q, pool, rows, keys, latent, scale, form)


def _each_once(blocks: jax.Array, count: jax.Array) -> jax.Array:
    """Without those that are listed before, or from `count` on: these are -1."""
    place = jnp.arange(blocks.shape[1])
    before = (blocks[:, :, None] == blocks[:, None, :]) & (place < place[:, None])
    return jnp.where((place < count[:, None]) & ~before.any(-1), blocks, -1)


def _check(
    q: jax.Array, pool: jax.Array, latent: int, blocks: jax.Array | None, count: jax.Array | None, block_size: int
) -> None:
    if pool.shape[1] != 1 or pool.shape[3] != q.shape[3]:
        raise ValueError(f"pool is {pool.shape}; it must be [pages, 1, page_size, {q.shape[3]}], as wide as q")
    if not 0 < latent < q.shape[3]:
        raise ValueError(f"latent is {latent}; it must be positive, and less than q's width {q.shape[3]}")
    if (blocks is None) != (count is None):
        raise ValueError("blocks and count go together; one of them is None")
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}; it must be at least 1")
