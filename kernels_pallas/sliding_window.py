"""Causal attention through a window with sinks, forward and backward, over keys in a row or in the pages of a cache.

The query at position p sees the key at position s <= p where p - s < window (arXiv:2004.05150) or s < sinks
(arXiv:2309.17453); without a window it sees all s <= p. A head may have a sink logit, which joins the softmax's
denominator and has no value (gpt-oss, arXiv:2508.10925):

    out[p] = sum_s exp(scale q[p] k[s]) v[s] / (exp(sink_logit) + sum_s exp(scale q[p] k[s]))

A query that sees no key gives 0, and no gradient. h heads share g groups of keys and values (arXiv:2305.13245).
- `sliding_window`: keys in a row, of another width than values or the same; differentiable. For training and scoring.
- `paged_sliding_window`: keys in a paged cache (model/cache.py); no gradient. For decode, and for a prompt's chunks.

Blocks of keys outside the band are skipped. The passes are those of FlashAttention-2 (arXiv:2307.08691 section 3.1):
the backward one computes probabilities again, from lse, the log2 of what each softmax divided by; with
delta = sum(dout * out), the gradient of a sink logit is the sum of -exp(sink_logit) / exp2(lse) * delta.
Keys and values that no query sees, and those from a row's length on, may be NaN.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from . import band_walk
from .band import Band
from .band_tiles import Block, Plan, attend, over_keys, read_pages, read_row
from .dispatch import Impl, kernel_options, resolve
from .online_softmax import LOG2E, NONE, base2, merge
from .query_tile import Program, QueryTile
from .tiles import Parts, Ref, count, inner, load, mix, plus, store_rows, zeros

Gradients = tuple[jax.Array, jax.Array, jax.Array]  # of q, k and v


def sliding_window_reference(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    start: jax.Array,
    length: jax.Array,
    *,
    window: int | None,
    sinks: int = 0,
    sink_logits: jax.Array | None = None,
    scale: float,
) -> jax.Array:
    shared = q.shape[2] // k.shape[2]
    position, at = start[:, None] + jnp.arange(q.shape[1]), jnp.arange(k.shape[1])
    held = at < length[:, None]  # [b, s]
    k, v = (jnp.where(held[:, :, None, None], jnp.repeat(x, shared, axis=2), 0) for x in (k, v))
    seen = (Band(window, sinks).sees(position[:, :, None], at) & held[:, None])[:, None]
    scores = jnp.einsum("bthk,bshk->bhts", q, k, preferred_element_type=jnp.float32) * scale
    sink = jnp.broadcast_to(_logits(sink_logits, q.shape[2])[:, None, None], (*scores.shape[:3], 1))
    p = jax.nn.softmax(jnp.concatenate([jnp.where(seen, scores, NONE), sink], axis=-1), axis=-1)[..., :-1]
    return jnp.einsum("bhts,bshv->bthv", jnp.where(seen, p, 0).astype(v.dtype), v).astype(q.dtype)


def paged_sliding_window_reference(
    q: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    start: jax.Array,
    length: jax.Array,
    *,
    window: int | None,
    sinks: int = 0,
    sink_logits: jax.Array | None = None,
    scale: float,
) -> jax.Array:
    pages = pool[page_table].swapaxes(2, 3)  # [b, pages, page_size, 2g, k]
    both = pages.reshape(len(q), -1, *pages.shape[3:]).astype(q.dtype)
    kept = Band(window, sinks).keeps(start[:, None], jnp.arange(both.shape[1]))  # the others' pages may be anybody's
    kept = jnp.broadcast_to(kept, both.shape[:2])
    k, v = jnp.split(jnp.where(kept[:, :, None, None], both, 0), 2, axis=2)
    out = sliding_window_reference(
        q, k, v, start, start + length, window=window, sinks=sinks, sink_logits=sink_logits, scale=scale
    )
    return jnp.where((jnp.arange(q.shape[1]) < length[:, None])[:, :, None, None], out, 0)


def _logits(sink_logits: jax.Array | None, heads: int) -> jax.Array:
    """[h] f32, finite"""
    return jnp.full((heads,), NONE) if sink_logits is None else jnp.maximum(sink_logits.astype(jnp.float32), NONE)


def _kernel(
    start_ref: Ref,
    length_ref: Ref,
    sink_ref: Ref,
    q_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    out_ref: Ref,
    lse_ref: Ref,
    *,
    plan: Plan,
) -> None:
    here = Program.this()
    tile = QueryTile.of(here, here.tile, plan.places, plan.shared, start_ref[here.row], q_ref.shape[1])
    read = partial(read_row, k_ref, v_ref, here, q_ref.dtype)
    sink = load(sink_ref, tile.head, mask=tile.real)
    out, lse = attend(plan, tile, tile.load_rows(q_ref), sink, length_ref[here.row], read, v_ref.shape[-1])
    tile.store_rows(out_ref, out, tile.real)
    tile.store(lse_ref, lse, tile.real)


def _paged_kernel(
    start_ref: Ref,
    length_ref: Ref,
    table_ref: Ref,
    sink_ref: Ref,
    q_ref: Ref,
    pool_ref: Ref,
    out_ref: Ref,
    lse_ref: Ref,
    *,
    plan: Plan,
) -> None:
    """Results are [splits * b, ...], and the sink is in the first split's."""
    this, rows = Program.this(), q_ref.shape[0]
    split_index, here = jax.lax.div(this.row, rows), this._replace(row=jax.lax.rem(this.row, rows))
    start, num_queries = start_ref[here.row], length_ref[here.row]
    tile = QueryTile.of(here, here.tile, plan.places, plan.shared, start, num_queries)
    sink = jnp.where(split_index == 0, load(sink_ref, tile.head, mask=tile.real), NONE)
    read = partial(read_pages, pool_ref, table_ref, here, q_ref.dtype)
    end, width = start + num_queries, pool_ref.shape[-1]
    out, lse = attend(plan, tile, tile.load_rows(q_ref), sink, end, read, width, split_index)
    tile, there = tile._replace(row=this.row), tile.query < q_ref.shape[1]
    tile.store_rows(out_ref, out, there)
    tile.store(lse_ref, lse, there)


def _dq_kernel(
    start_ref: Ref,
    length_ref: Ref,
    q_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    dout_ref: Ref,
    lse_ref: Ref,
    delta_ref: Ref,
    dq_ref: Ref,
    *,
    plan: Plan,
) -> None:
    here = Program.this()
    tile = QueryTile.of(here, here.tile, plan.places, plan.shared, start_ref[here.row], q_ref.shape[1])
    dout, lse, delta = tile.load_rows(dout_ref), tile.load(lse_ref)[:, None], tile.load(delta_ref)[:, None]

    def add(dq: Parts, block: Block) -> Parts:
        p = jnp.where(block.seen, jnp.exp2(block.scores - lse), 0)
        return plus(dq, mix(p * (inner(dout, block.values) - delta) * plan.scale, block.keys))

    read = partial(read_row, k_ref, v_ref, here, q_ref.dtype)
    nothing = zeros(plan.places, q_ref.shape[-1])
    dq = over_keys(plan, tile, tile.load_rows(q_ref), length_ref[here.row], read, nothing, add)
    tile.store_rows(dq_ref, dq, tile.real)


def _dkv_kernel(
    start_ref: Ref,
    length_ref: Ref,
    q_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    dout_ref: Ref,
    lse_ref: Ref,
    delta_ref: Ref,
    dk_ref: Ref,
    dv_ref: Ref,
    *,
    plan: Plan,
) -> None:
    """Of a block of keys, over the tiles of queries that see any of it. Scores are [s, m], as both products want the
    probabilities."""
    here, num_queries = Program.this(), q_ref.shape[1]
    start, end = start_ref[here.row], length_ref[here.row]
    at = count(plan.block, here.tile * plan.block)
    keys, values = read_row(k_ref, v_ref, here, q_ref.dtype, at, at < end)

    def turn(index: jax.Array, totals: tuple[Parts, Parts]) -> tuple[Parts, Parts]:
        tile = QueryTile.of(here, index, plan.places, plan.shared, start, num_queries)
        q, dout = tile.load_rows(q_ref), tile.load_rows(dout_ref)
        seen = (at < end)[:, None] & plan.band.sees(tile.position[None, :], at[:, None])
        scores = inner(keys, q) * (plan.scale * LOG2E)
        p = jnp.where(seen, jnp.exp2(scores - tile.load(lse_ref)[None, :]), 0)
        ds = p * (inner(values, dout) - tile.load(delta_ref)[None, :]) * plan.scale
        return plus(totals[0], mix(ds, q)), plus(totals[1], mix(p, dout))

    block = here.tile * plan.block
    first, stop = (
        jnp.clip(position - start, 0, num_queries) * plan.shared
        for position in plan.band.queries(block, block + (plan.block - 1), end)
    )
    tiles = jax.lax.div(first, plan.places), jax.lax.div(stop + (plan.places - 1), plan.places)
    nothing = zeros(plan.block, k_ref.shape[-1]), zeros(plan.block, v_ref.shape[-1])
    dk, dv = jax.lax.fori_loop(*tiles, turn, nothing)
    store_rows(dk_ref, here.row, at, here.group, value=dk, mask=at < k_ref.shape[1])
    store_rows(dv_ref, here.row, at, here.group, value=dv, mask=at < v_ref.shape[1])


def sliding_window(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    start: jax.Array,
    length: jax.Array,
    *,
    window: int | None,
    sinks: int = 0,
    sink_logits: jax.Array | None = None,
    scale: float,
    impl: str = "auto",
) -> jax.Array:
    """q [b, t, h, k], k [b, s, g, k], v [b, s, g, v], start and length [b] int32, sink_logits [h] or None ->
    [b, t, h, v] in q's dtype. Query i of row r has position start[r] + i, and the row's keys are those below length[r].

    Differentiable in q, k, v and sink_logits, in reverse and once. float32, bfloat16 or float16; products accumulate in
    float32, as softmax does. Window, sinks and scale are numbers that a program is compiled for. `impl`: "auto", "xla",
    "pallas" or "interpret". Raises ValueError for another one, for a window below 1 or sinks below 0, and where h is no
    multiple of g.
    """
    _check_heads(q, k.shape[2])
    form = _Form(Band(window, sinks), scale, resolve(impl))
    length = jnp.minimum(length, k.shape[1])  # what is not there is not read
    return _attention(form, q, k, v, _logits(sink_logits, q.shape[2]), start, length)


def paged_sliding_window(
    q: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    start: jax.Array,
    length: jax.Array,
    *,
    window: int | None,
    sinks: int = 0,
    sink_logits: jax.Array | None = None,
    scale: float,
    impl: str = "auto",
) -> jax.Array:
    """q [b, t, h, k], pool [pages, 2g, page_size, k] with the g heads' keys, then their values, page_table [b, n] and
    start and length [b] int32, sink_logits [h] or None -> [b, t, h, k] in q's dtype.

    Row r's position p is slot p % page_size of page page_table[r, p // page_size]. Its first length[r] queries are
    real, have the positions from start[r] on, and are in the cache with all that came before them; the others give 0.
    Entries of the table count only for positions that a real query sees. `impl` and errors as in `sliding_window`.
    """
    _check_heads(q, pool.shape[1] // 2)
    form = _Form(Band(window, sinks), scale, resolve(impl))
    forward = _paged_xla if form.impl == "xla" else _paged_pallas
    capacity = page_table.shape[1] * pool.shape[2]
    length = jnp.minimum(length, jnp.minimum(q.shape[1], capacity - start))  # what is not there is not read
    return forward(form, _Paged(q, pool, page_table, _logits(sink_logits, q.shape[2]), start, length))


def _check_heads(q: jax.Array, groups: int) -> None:
    if q.shape[2] % groups:
        raise ValueError(f"{q.shape[2]} heads cannot share {groups} groups of keys; heads must be a multiple of groups")


class _Form(NamedTuple):
    """What a call is compiled for."""

    band: Band
    scale: float
    impl: Impl


class _Row(NamedTuple):
    """The arguments of `sliding_window`, as `_attention` takes them."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    logits: jax.Array  # [h] f32
    start: jax.Array
    length: jax.Array

    @property
    def positions(self) -> jax.Array:
        return self.start[:, None] + jnp.arange(self.q.shape[1])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(form: _Form, *inputs: jax.Array) -> jax.Array:
    return _forward(form, _Row(*inputs))[0]


def _attention_forward(form: _Form, *inputs: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    out, lse = _forward(form, _Row(*inputs))
    return out, (*inputs, out, lse)


def _attention_backward(form: _Form, saved: tuple[jax.Array, ...], dout: jax.Array) -> tuple[jax.Array | None, ...]:
    *inputs, out, lse = saved
    row = _Row(*inputs)
    delta = (dout.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)
    backward = _backward_xla if form.impl == "xla" else _backward_pallas
    sink_share = jnp.exp2(base2(row.logits) - lse)
    return *backward(form, row, dout, lse, delta), -(sink_share * delta).sum((0, 1)), None, None


_attention.defvjp(_attention_forward, _attention_backward)


def _forward(form: _Form, row: _Row) -> tuple[jax.Array, jax.Array]:
    """[b, t, h, v] in q's dtype, and lse [b, t, h] f32."""
    forward = _forward_xla if form.impl == "xla" else _forward_pallas
    return forward(form, row)


def _forward_xla(form: _Form, row: _Row) -> tuple[jax.Array, jax.Array]:
    source = _source(form, band_walk.in_blocks(row.k), band_walk.in_blocks(row.v), row.length)
    return band_walk.attend(source, row.q, row.positions, row.logits, row.k.shape[2])


def _forward_pallas(form: _Form, row: _Row) -> tuple[jax.Array, jax.Array]:
    q, _, v, *_ = row
    plan = Plan.of(form.band, form.scale, q, row.k.shape[2], v.shape[-1], v.shape[1])
    return pl.pallas_call(
        partial(_kernel, plan=plan),
        (jax.ShapeDtypeStruct((*q.shape[:3], v.shape[-1]), q.dtype), jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)),
        grid=plan.grid(q),
        name="sliding_window",
        **kernel_options(form.impl, num_warps=plan.warps, num_stages=2),
    )(row.start, row.length, base2(row.logits), q, row.k, v)


def _backward_xla(form: _Form, row: _Row, dout: jax.Array, lse: jax.Array, delta: jax.Array) -> Gradients:
    blocks = band_walk.in_blocks(row.k), band_walk.in_blocks(row.v)
    source, by_query = _source(form, *blocks, row.length), (row.q, dout, lse[..., None], delta[..., None])
    dq, dk, dv = band_walk.gradients(source, blocks, row.positions, by_query)
    return dq, band_walk.out_of_blocks(dk, row.k), band_walk.out_of_blocks(dv, row.v)


def _backward_pallas(form: _Form, row: _Row, dout: jax.Array, lse: jax.Array, delta: jax.Array) -> Gradients:
    q, k, v, _, start, length = row
    plan = Plan.of(form.band, form.scale, q, k.shape[2], v.shape[-1], v.shape[1], backward=True)
    inputs = start, length, q, k, v, dout, lse, delta
    dq = pl.pallas_call(
        partial(_dq_kernel, plan=plan),
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=plan.grid(q),
        name="sliding_window_dq",
        **kernel_options(form.impl, num_warps=plan.warps, num_stages=2),
    )(*inputs)
    dk, dv = pl.pallas_call(
        partial(_dkv_kernel, plan=plan),
        (jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)),
        grid=(pl.cdiv(k.shape[1], plan.block), k.shape[2], len(k)),
        name="sliding_window_dkv",
        **kernel_options(form.impl, num_warps=plan.warps, num_stages=2),
    )(*inputs)
    return dq, dk, dv


class _Paged(NamedTuple):
    """The arguments of `paged_sliding_window`, as its forms take them."""

    q: jax.Array
    pool: jax.Array
    page_table: jax.Array
    logits: jax.Array
    start: jax.Array
    length: jax.Array


def _paged_xla(form: _Form, paged: _Paged) -> jax.Array:
    q, pool, page_table, logits, start, length = paged
    query = jnp.arange(q.shape[1])
    position = jnp.where(query < length[:, None], start[:, None] + query, -1)
    size = band_walk.FEW_BLOCK if q.shape[1] < band_walk.FEW else band_walk.BLOCK
    read = partial(band_walk.read_pages, pool, page_table, size, q.dtype)
    source = band_walk.Source(read, size, start + length, form.band, form.scale)
    return band_walk.attend(source, q, position, logits, pool.shape[1] // 2)[0]


def _paged_pallas(form: _Form, paged: _Paged) -> jax.Array:
    q, pool, page_table, logits, start, length = paged
    _, heads, page_size, width = pool.shape
    num_keys = page_table.shape[1] * page_size
    plan = Plan.of(form.band, form.scale, q, heads // 2, width, num_keys).split(q, num_keys)
    shape = plan.splits * q.shape[0], *q.shape[1:]
    out, lse = pl.pallas_call(
        partial(_paged_kernel, plan=plan),
        (
            jax.ShapeDtypeStruct(shape, jnp.float32 if plan.splits > 1 else q.dtype),
            jax.ShapeDtypeStruct(shape[:3], jnp.float32),
        ),
        grid=plan.grid(q),
        name="paged_sliding_window",
        **kernel_options(form.impl, num_warps=plan.warps, num_stages=2),
    )(start, length, page_table, base2(logits), q, pool)
    if plan.splits == 1:
        return out
    return merge(out.reshape(-1, *q.shape), lse.reshape(-1, *q.shape[:3]))[0].astype(q.dtype)


def _source(form: _Form, keys: jax.Array, values: jax.Array, end: jax.Array) -> band_walk.Source:
    """Of keys and values in blocks."""
    return band_walk.Source(partial(band_walk.read_blocks, keys, values), keys.shape[3], end, form.band, form.scale)
