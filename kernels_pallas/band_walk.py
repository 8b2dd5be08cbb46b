"""Attention over a band of keys in XLA's own loops: one tile of queries after the other, each over its blocks of keys.

The rows of a batch go side by side, each over its own blocks, in as many turns as the longest walk takes. The m rows of
a tile are its queries, each with the j heads that share a group's keys and values. What no query may see is replaced
before any product, since 0 * NaN is NaN. All products accumulate in float32.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .band import FAR, Band
from .online_softmax import LOG2E, Sums, base2

TILE, BLOCK = 128, 64  # queries and keys
FEW, FEW_BLOCK = 16, 32  # of fewer queries, keys at a time; as measured on CPU
State = TypeVar("State")
Read = Callable[[jax.Array], tuple[jax.Array, jax.Array]]  # blocks [b] -> keys [b, g, s, k], values [b, g, s, v]

_product = partial(jnp.einsum, preferred_element_type=jnp.float32)


class Source(NamedTuple):
    """Where keys are: row r's are below end[r], and `read` gives a block of `size` of every row."""

    read: Read
    size: int
    end: jax.Array  # [b] int32
    band: Band
    scale: float


class Block(NamedTuple):
    number: jax.Array  # [b]
    keys: jax.Array
    values: jax.Array
    scores: jax.Array  # [b, g, m, s] f32, to base 2
    seen: jax.Array  # [b, 1, m, s] bool


def attend(
    source: Source, q: jax.Array, position: jax.Array, sinks: jax.Array, groups: int
) -> tuple[jax.Array, jax.Array]:
    """q [b, t, h, k], position [b, t] (-1: no query), sinks [h] f32 -> [b, t, h, v] in q's dtype, and log2 of what each
    softmax divides by [b, t, h] f32."""
    width = jax.eval_shape(source.read, source.end)[1].shape[-1]
    sink = jnp.broadcast_to(base2(sinks)[:, None], (*q.shape[:3], 1))

    def tile(inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, position, sink = inputs
        (out,), lse = _walk(source, q, position, Sums.begin(sink[..., 0], (width,)), _add).finish()
        return out.astype(q.dtype), lse[..., None]

    out, lse = jax.lax.map(tile, (_fold(q, groups), _fold_positions(position, q, groups), _fold(sink, groups)))
    return _unfold(out, q), _unfold(lse, q)[..., 0]


def gradients(
    source: Source, blocks: tuple[jax.Array, jax.Array], position: jax.Array, by_query: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """blocks: keys and values [b, blocks, g, s, *]; by_query: q, the gradient of the result [b, t, h, *], log2 of what
    each softmax divided by, and the sum of result times gradient [b, t, h, 1] -> the gradients of q, and of the blocks
    in f32."""
    q, groups = by_query[0], blocks[0].shape[2]

    def tile(totals: tuple[jax.Array, ...], inputs: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, ...], jax.Array]:
        position, q, do, lse, delta = inputs

        def add(state: tuple[jax.Array, ...], block: Block) -> tuple[jax.Array, ...]:
            dq, dk, dv = state
            p = jnp.where(block.seen, jnp.exp2(block.scores - lse), 0)
            ds = (p * (_product("bgmv,bgsv->bgms", do, block.values) - delta) * source.scale).astype(q.dtype)
            rows = jnp.arange(len(dk))
            dk = dk.at[rows, block.number].add(_product("bgms,bgmk->bgsk", ds, q))
            dv = dv.at[rows, block.number].add(_product("bgms,bgmv->bgsv", p.astype(q.dtype), do))
            return dq + _product("bgms,bgsk->bgmk", ds, block.keys), dk, dv

        dq, dk, dv = _walk(source, q, position, (jnp.zeros(q.shape, jnp.float32), *totals), add)
        return (dk, dv), dq.astype(q.dtype)

    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in blocks)
    inputs = _fold_positions(position, q, groups), *(_fold(x, groups) for x in by_query)
    (dk, dv), dq = jax.lax.scan(tile, zeros, inputs)
    return _unfold(dq, q), dk, dv


def _walk(
    source: Source, q: jax.Array, position: jax.Array, state: State, add: Callable[[State, Block], State]
) -> State:
    """Over all blocks that a tile's queries see: q [b, g, m, k], position [b, 1, m, 1]."""
    first = jnp.where(position < 0, FAR, position).min((1, 2, 3))
    walk = source.band.keys(first, position.max((1, 2, 3)), source.end, source.size)

    def turn(index: jax.Array, state: State) -> State:
        number = walk.block(index)
        at = number[:, None] * source.size + jnp.arange(source.size)
        held = (at < source.end[:, None]) & source.band.keeps(first[:, None], at)
        keys, values = (jnp.where(held[:, None, :, None], x, 0) for x in source.read(number))
        scores = _product("bgmk,bgsk->bgms", q, keys) * (source.scale * LOG2E)
        seen = held[:, None, None] & source.band.sees(position, at[:, None, None])
        return add(state, Block(number, keys, values, scores, seen))

    return jax.lax.fori_loop(0, walk.length.max(), turn, state)


def _add(sums: Sums, block: Block) -> Sums:
    def mix(p: jax.Array) -> tuple[jax.Array]:
        return (_product("bgms,bgsv->bgmv", p.astype(block.values.dtype), block.values),)

    return sums.add(block.scores, block.seen, mix)


def in_blocks(x: jax.Array) -> jax.Array:
    """[b, s, g, n] -> [b, blocks, g, size, n], with zeros at the end."""
    b, s, g, n = x.shape
    size = min(BLOCK, s)
    x = jnp.pad(x, ((0, 0), (0, -s % size), (0, 0), (0, 0)))
    return x.reshape(b, -1, size, g, n).swapaxes(2, 3)


def out_of_blocks(x: jax.Array, like: jax.Array) -> jax.Array:
    b, s, g, n = like.shape
    return x.swapaxes(2, 3).reshape(b, -1, g, n)[:, :s].astype(like.dtype)


def read_blocks(keys: jax.Array, values: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of what `in_blocks` makes, block number[r] of every row r; any where there is none."""
    rows = jnp.arange(len(number))
    return keys.at[rows, number].get(mode="clip"), values.at[rows, number].get(mode="clip")


def read_pages(
    pool: jax.Array, page_table: jax.Array, size: int, dtype: DTypeLike, number: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Of a pool [pages, 2g, page_size, k] that holds keys, then values, block number[r] of every row r of the table
    [b, pages]; any where there is none. Blocks and pages are read in the largest parts that both are made of."""
    _, heads, page_size, width = pool.shape
    part = math.gcd(page_size, size)
    parts = page_size // part  # of a page
    at = number[:, None] * (size // part) + jnp.arange(size // part)
    page = jnp.take_along_axis(page_table, at // parts, axis=1, mode="clip")
    head = (page * heads)[:, None] + jnp.arange(heads)[:, None]  # [b, heads, parts of the block]
    found = pool.reshape(-1, part, width).at[head * parts + (at % parts)[:, None]].get(mode="clip")
    found = found.reshape(len(at), heads, size, width).astype(dtype)
    return found[:, : heads // 2], found[:, heads // 2 :]


def _fold(x: jax.Array, groups: int, fill: int = 0) -> jax.Array:
    """[b, t, h, n] -> [tiles, b, g, m, n]"""
    b, t, h, n = x.shape
    size = min(TILE, t)
    x = jnp.pad(x, ((0, 0), (0, -t % size), (0, 0), (0, 0)), constant_values=fill)
    x = x.reshape(b, -1, size, groups, h // groups, n).transpose(1, 0, 3, 2, 4, 5)
    return x.reshape(*x.shape[:3], -1, n)


def _fold_positions(position: jax.Array, q: jax.Array, groups: int) -> jax.Array:
    """[b, t] -> [tiles, b, 1, m, 1]"""
    per_head = jnp.broadcast_to(position[:, :, None, None], (*position.shape, q.shape[2] // groups, 1))
    return _fold(per_head, 1, -1)


def _unfold(x: jax.Array, like: jax.Array) -> jax.Array:
    """[tiles, b, g, m, n] -> [b, t, h, n]"""
    b, t, h, _ = like.shape
    tiles, _, g, _, n = x.shape
    x = x.reshape(tiles, b, g, -1, h // g, n).transpose(1, 0, 3, 2, 4, 5)
    return x.reshape(b, -1, h, n)[:, :t]
