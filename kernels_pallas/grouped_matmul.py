"""The experts' feed-forward over routed tokens: y[n] = sum_j weight[n, j] * SwiGLU_{expert[n, j]}(x[n]).

x [n, d], experts [n, k] int32, weights [n, k] f32, gate and up [e, f, d], down [e, d, f], or joined [d, e, f], whose
rows hold all experts' side by side -> y [n, d] in x's dtype. No token is ever dropped, whatever the routing. Forms:
- "dense": every expert on every token. Best for tiny stacks, and the form that partitions over an expert mesh axis.
- "flat": the same as three plain products, gate and up [e*f, d] and, from a joined down, [d, e*f]: nothing is copied
  out of a stack. Best where the few tokens that there are use most experts.
- "loop": each used expert, on all tokens. Best for few tokens: a weight is read once or not at all.
- "runs": (token, expert) pairs sorted by expert; each used expert over its run of them, in blocks of a few rows. Best
  for more tokens: a weight is copied out of its stack once, and the work is that of the pairs and of less than a block
  an expert. Its gradient is that of "blocks".
- "blocks": the sorted pairs in padded blocks of BLOCK rows, as many as any routing may need: a loop of known length,
  hence one that differentiates.
- "ragged": sorted pairs through jax.lax.ragged_dot, for GPU and TPU.

On 2 cores, 16 experts of 384 x 768, 4 a token, CPU milliseconds by the number of tokens ("runs" of 4 tokens: blocks of
4 rows):

    tokens     4    8   16   32   64  128  512
    loop     6.4  8.0   12   18   30   53
    runs     8.0  7.2  9.2   12   14   22   72
    blocks                        19   26   90
    flat, over runs in the same minutes on another machine:
            0.63 0.50 0.60 0.78 1.18
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from .blocked import blocked_product, prefers_blocks, prefers_single_rows, row_by_row
from .dispatch import device_kind

BLOCK = 32
FEWEST_ROWS, MOST_ROWS = 8, 32  # of a block of "runs"
LOOP_TOKENS = 4  # up to here "loop" beats "runs" on a CPU
FLAT_TOKENS = 32  # up to here "flat" beats both, where there are as many pairs as experts
DENSE_SIZE = 1 << 17  # stacks of fewer weights than this are cheapest computed whole


def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    """x [n, in], w [out, in] -> [n, out] f32."""
    if prefers_single_rows(x.shape[0], w):
        return row_by_row(x, w)
    if prefers_blocks(x.shape[0], w):
        return blocked_product(x, w)
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _swiglu(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """x [n, d], gate and up [f, d], down [d, f] -> [n, d] f32."""
    hidden = jax.nn.silu(_product(x, gate)) * _product(x, up)
    return _product(hidden.astype(x.dtype), down)


def _spread(experts: jax.Array, weights: jax.Array, num_experts: int) -> jax.Array:
    """Routing weights as a full table [n, e] f32, zero where not routed."""
    rows = jnp.arange(experts.shape[0])[:, None]
    return jnp.zeros((experts.shape[0], num_experts), jnp.float32).at[rows, experts].add(weights)


def grouped_mlp_reference(
    x: jax.Array, experts: jax.Array, weights: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array
) -> jax.Array:
    table = _spread(experts, weights, gate.shape[0])
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    hidden = jax.nn.silu(product("nd,efd->enf", x, gate)) * product("nd,efd->enf", x, up)
    out = product("enf,edf->end", hidden.astype(x.dtype), down)
    routed = jnp.where(table.T[:, :, None] == 0, 0, out)  # 0 x inf would be NaN
    return jnp.einsum("end,ne->nd", routed, table).astype(x.dtype)


def _flat(
    x: jax.Array, experts: jax.Array, weights: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array
) -> jax.Array:
    """`down` joined."""
    table = _spread(experts, weights, gate.shape[0])[:, :, None]
    gate, up = (stack.reshape(-1, stack.shape[2]) for stack in (gate, up))
    hidden = (jax.nn.silu(_product(x, gate)) * _product(x, up)).reshape(*table.shape[:2], -1)
    hidden = jnp.where(table == 0, 0, hidden * table)  # 0 x inf would be NaN
    return _product(hidden.reshape(len(x), -1).astype(x.dtype), down.reshape(len(down), -1)).astype(x.dtype)


def _loop(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    down_axis: int = 0,
) -> jax.Array:
    num_experts = gate.shape[0]
    table = _spread(experts, weights, num_experts)
    used = jnp.zeros((num_experts,), jnp.bool_).at[experts.reshape(-1)].set(True)

    def add(index: jax.Array, total: jax.Array) -> jax.Array:
        out = _swiglu(x, gate[index], up[index], _of_expert(down, down_axis, index))
        weight = jax.lax.dynamic_slice_in_dim(table, index, 1, axis=1)
        return total + jnp.where(weight == 0, 0, out * weight)  # an overflow where a row is not routed is not its own

    def body(index: jax.Array, total: jax.Array) -> jax.Array:
        return jax.lax.cond(used[index], add, lambda _, same: same, index, total)

    return jax.lax.fori_loop(0, num_experts, body, jnp.zeros(x.shape, jnp.float32)).astype(x.dtype)


def _sorted_pairs(experts: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(expert, token, weight) of every pair, ordered by expert; each [n*k]."""
    flat = experts.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    return flat[order], order // experts.shape[1], weights.reshape(-1)[order]


def _blocks(
    x: jax.Array, experts: jax.Array, weights: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array
) -> jax.Array:
    num_experts, (pairs, dim) = gate.shape[0], (experts.size, x.shape[1])
    expert, token, weight = _sorted_pairs(experts, weights)
    counts = jnp.zeros((num_experts,), jnp.int32).at[expert].add(1)
    blocks = (counts + BLOCK - 1) // BLOCK  # blocks of each expert
    first_block = jnp.cumsum(blocks) - blocks
    first_pair = jnp.cumsum(counts) - counts
    place = first_block[expert] * BLOCK + jnp.arange(pairs) - first_pair[expert]  # padded row of each pair
    num_blocks = pairs // BLOCK + min(num_experts, pairs)  # static bound on sum(blocks)
    padded = jnp.zeros((num_blocks * BLOCK, dim), x.dtype).at[place].set(x[token]).reshape(num_blocks, BLOCK, dim)
    owner = jnp.searchsorted(jnp.cumsum(blocks), jnp.arange(num_blocks), side="right")  # == num_experts: unused

    def run(rows: jax.Array, index: jax.Array) -> jax.Array:
        return _swiglu(rows, gate[index], up[index], down[index])

    def skip(rows: jax.Array, _: jax.Array) -> jax.Array:
        return jnp.zeros(rows.shape, jnp.float32)

    def body(_: None, block: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        rows, index = block
        return None, jax.lax.cond(index < num_experts, run, skip, rows, jnp.minimum(index, num_experts - 1))

    _, out = jax.lax.scan(body, None, (padded, owner))
    routed = out.reshape(-1, dim)[place] * weight[:, None]
    return jnp.zeros(x.shape, jnp.float32).at[token].add(routed).astype(x.dtype)


def _block_rows(pairs: int, num_experts: int) -> int:
    """Of "runs": half of an expert's share of the pairs, up to a power of two."""
    rows = FEWEST_ROWS
    while rows < MOST_ROWS and 2 * rows * num_experts < pairs:
        rows *= 2
    return rows


def _of_expert(down: jax.Array, axis: int, index: jax.Array) -> jax.Array:
    """[d, f]"""
    return jax.lax.dynamic_index_in_dim(down, index, axis, keepdims=False)


def _run_by_run(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    down_axis: int = 0,
) -> jax.Array:
    num_experts, pairs = gate.shape[0], experts.size
    size = _block_rows(pairs, num_experts)
    order = jnp.argsort(experts.reshape(-1), stable=True)
    token = jnp.pad(order // experts.shape[1], (0, size))
    counts = jnp.zeros((num_experts,), jnp.int32).at[experts.reshape(-1)].add(1)
    first = jnp.cumsum(counts) - counts
    used = jnp.argsort(counts == 0, stable=True)  # those without a pair last

    def run(turn: jax.Array, out: jax.Array) -> jax.Array:
        index = used[turn]
        own = gate[index], up[index], _of_expert(down, down_axis, index)

        def block(number: jax.Array, out: jax.Array) -> jax.Array:
            # The last one reaches into the next expert's run, which is written after it.
            start = first[index] + number * size
            rows = x[jax.lax.dynamic_slice_in_dim(token, start, size)]
            return jax.lax.dynamic_update_slice_in_dim(out, _swiglu(rows, *own), start, axis=0)

        return jax.lax.fori_loop(0, -(-counts[index] // size), block, out)

    out = jnp.zeros((pairs + size, x.shape[1]), jnp.float32)
    out = jax.lax.fori_loop(0, jnp.sum(counts > 0), run, out)
    place = jnp.argsort(order).reshape(experts.shape)  # of each pair in the sorted order
    return (out[place] * weights[:, :, None]).sum(1).astype(x.dtype)


@jax.custom_vjp
def _runs(
    x: jax.Array, experts: jax.Array, weights: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array
) -> jax.Array:
    return _run_by_run(x, experts, weights, gate, up, down)


_runs.defvjp(partial(jax.vjp, _blocks), lambda pull_back, y: pull_back(y))


def _ragged(
    x: jax.Array, experts: jax.Array, weights: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array
) -> jax.Array:
    expert, token, weight = _sorted_pairs(experts, weights)
    sizes = jnp.zeros((gate.shape[0],), jnp.int32).at[expert].add(1)
    rows = x[token]
    hidden = jax.nn.silu(jax.lax.ragged_dot(rows, gate.swapaxes(1, 2), sizes))
    hidden = hidden * jax.lax.ragged_dot(rows, up.swapaxes(1, 2), sizes)
    out = jax.lax.ragged_dot(hidden, down.swapaxes(1, 2), sizes, preferred_element_type=jnp.float32)
    return jnp.zeros(x.shape, jnp.float32).at[token].add(out * weight[:, None]).astype(x.dtype)


_Form = Callable[..., jax.Array]
_FORMS: dict[str, _Form] = {
    "dense": grouped_mlp_reference,
    "loop": _loop,
    "runs": _runs,
    "blocks": _blocks,
    "ragged": _ragged,
}
_JOINED_FORMS: dict[str, _Form] = {  # those that take a joined down as it is
    "flat": _flat,
    "loop": partial(_loop, down_axis=1),
    "runs": partial(_run_by_run, down_axis=1),
}


def grouped_mlp(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    impl: str = "auto",
    joined: bool = False,
) -> jax.Array:
    """`impl`: "auto" or one of the forms above; ValueError for another name. `joined`: down is [d, e, f]. Every form
    takes either, but turns what it has no use for round; "auto" takes none that does."""
    if impl == "auto":
        impl = _choose(experts, gate, joined=joined)
    if impl not in _FORMS and impl not in _JOINED_FORMS:
        raise ValueError(f"impl is {impl!r}; it must be 'auto' or one of {', '.join({**_FORMS, **_JOINED_FORMS})}")
    forms = _JOINED_FORMS if impl not in _FORMS or (joined and impl in _JOINED_FORMS) else _FORMS
    if joined != (forms is _JOINED_FORMS):
        down = down.swapaxes(0, 1)
    return forms[impl](x, experts, weights, gate, up, down)


def prefers_joined(gate: jax.Array) -> bool:
    """Whether a joined down pays on this device: not where all tokens take forms that have no use for one."""
    return device_kind() == "cpu" and gate.dtype == jnp.float32 and gate.size > DENSE_SIZE


def _choose(experts: jax.Array, gate: jax.Array, *, joined: bool) -> str:
    (num_tokens, top_k), num_experts = experts.shape, gate.shape[0]
    if device_kind() != "cpu":
        return "ragged"
    if gate.size <= DENSE_SIZE:
        return "dense"
    if joined and num_tokens <= FLAT_TOKENS and num_tokens * top_k >= num_experts:
        return "flat"
    return "loop" if num_tokens <= LOOP_TOKENS else "runs"
