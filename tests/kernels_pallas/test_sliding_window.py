"""Windowed attention with sinks, in every form, against a float64 loop over queries and heads, forward and backward."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas.sliding_window import (
    paged_sliding_window,
    paged_sliding_window_reference,
    sliding_window,
    sliding_window_reference,
)
from tests.kernels_pallas.compare import assert_close

pytestmark = pytest.mark.usefixtures("quick_compile")

SCALE = 0.3
EXACT = {"absolute": 2e-5, "relative": 1e-4}
ROUNDED = {"absolute": 0.03, "relative": 0.03, "cosine": 1e-3}


class Case(NamedTuple):
    queries: int
    keys: int
    heads: int
    groups: int
    k_width: int
    v_width: int
    window: int | None
    sinks: int
    has_logits: bool
    dtype: str = "float32"

    def arrays(self, seed=0, rows=2):
        """q, k, v, the gradient of the result, and the sink logits."""
        rng = np.random.default_rng(seed)
        heads = (self.heads, self.k_width), (self.groups, self.k_width), (self.groups, self.v_width)
        lengths = self.queries, self.keys, self.keys
        shapes = [(rows, length, *head) for length, head in zip(lengths, heads, strict=True)]
        shapes.append((*shapes[0][:3], self.v_width))
        logits = jnp.asarray(rng.normal(0, 2, self.heads), jnp.float32) if self.has_logits else None
        return *(jnp.asarray(rng.standard_normal(shape), self.dtype) for shape in shapes), logits

    @property
    def tolerance(self):
        return EXACT if self.dtype == "float32" else ROUNDED


SMALL = Case(40, 75, 6, 2, 24, 16, window=13, sinks=0, has_logits=True)
PLAIN = Case(75, 75, 2, 1, 16, 16, window=None, sinks=0, has_logits=False)
CASES = {
    "small": SMALL,
    "plain causal": PLAIN,
    "wide": Case(33, 75, 3, 1, 192, 128, window=13, sinks=3, has_logits=True, dtype="bfloat16"),
    "sinks of several blocks": Case(150, 300, 2, 2, 16, 16, window=40, sinks=70, has_logits=False),
}


def loop64(case, q, k, v, dout, logits, start, length):
    """The result, and the gradients of q, k, v and the logits."""
    q, k, v, dout = (np.asarray(x).astype(np.float64) for x in (q, k, v, dout))
    logits = np.full(case.heads, -np.inf) if logits is None else np.asarray(logits, np.float64)
    out, dq, dk, dv, dlogits = (np.zeros(x.shape) for x in (dout, q, k, v, logits))
    for r, i, head in np.ndindex(q.shape[:3]):
        p, g = start[r] + i, head // (case.heads // case.groups)
        seen = [s for s in range(min(length[r], p + 1)) if s < case.sinks or p - s < (case.window or np.inf)]
        if seen:
            keys, values, do = k[r, seen, g], v[r, seen, g], dout[r, i, head]
            scores = np.append(keys @ q[r, i, head] * SCALE, logits[head])
            weights = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
            out[r, i, head] = weights[:-1] @ values
            d_scores = weights * (np.append(values @ do, 0) - do @ out[r, i, head])
            dq[r, i, head] = d_scores[:-1] @ keys * SCALE
            dk[r, seen, g] += np.outer(d_scores[:-1], q[r, i, head]) * SCALE
            dv[r, seen, g] += np.outer(weights[:-1], do)
            dlogits[head] += d_scores[-1]
    return out, dq, dk, dv, dlogits


@partial(jax.jit, static_argnames=("impl", "window", "sinks"))
def forward_and_back(q, k, v, dout, logits, start, length, impl, window, sinks):
    def run(q, k, v, logits):
        options = {"window": window, "sinks": sinks, "scale": SCALE, "impl": impl}
        return sliding_window(q, k, v, start, length, sink_logits=logits, **options)

    out, pull_back = jax.vjp(run, q, k, v, logits)
    return out, *pull_back(dout)


def check(case, impl, start, length, seed=0):
    *arrays, logits = case.arrays(seed)
    want = loop64(case, *arrays, logits, start, length)
    gone = (np.arange(case.keys) >= np.array(length)[:, None])[..., None, None]
    q, k, v, dout = arrays
    k, v = (jnp.where(gone, jnp.nan, x) for x in (k, v))
    where = jnp.array(start, jnp.int32), jnp.array(length, jnp.int32)
    got = forward_and_back(q, k, v, dout, logits, *where, impl, case.window, case.sinks)
    for name, x, y in zip(("out", "dq", "dk", "dv", "dlogits"), got, want, strict=True):
        if x is not None:
            assert x.dtype == (jnp.float32 if name == "dlogits" else q.dtype)
            scale = max(np.abs(y).max(), 1)
            assert_close(np.asarray(x, np.float64) / scale, y / scale, **case.tolerance)
    return got


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("impl", ["xla", "interpret"])
def test_form_equals_float64_loop_forward_and_backward(impl, name):
    case = CASES[name]
    behind = case.keys - case.queries
    check(case, impl, [0, behind], [case.keys - 7, case.keys])


@pytest.mark.parametrize("impl", ["xla", "interpret"])
@given(st.data())
@settings(max_examples=10)
def test_rows_of_any_place_and_length(impl, data):
    start = data.draw(st.lists(st.integers(0, 100), min_size=2, max_size=2))
    length = data.draw(st.lists(st.integers(0, SMALL.keys), min_size=2, max_size=2))
    check(SMALL, impl, start, length, data.draw(st.integers(0, 9)))


@pytest.mark.parametrize("impl", ["xla", "interpret"])
def test_queries_that_see_nothing_give_zeros_and_no_gradient(impl):
    """Of empty rows, and of one whose keys have left the window."""
    for x in (*check(SMALL, impl, [0, 70], [0, 40]), *check(PLAIN, impl, [0, 30], [0, 0])[:4]):
        assert not np.asarray(x).any()


def test_reference_equals_float64_loop():
    for case in (SMALL, CASES["wide"], PLAIN):
        q, k, v, dout, logits = case.arrays()
        start, length = [0, case.keys - case.queries], [case.keys - 7, case.keys]
        options = {"window": case.window, "sinks": case.sinks, "sink_logits": logits, "scale": SCALE}
        got = jax.jit(partial(sliding_window_reference, **options))(q, k, v, jnp.array(start), jnp.array(length))
        assert_close(got, loop64(case, q, k, v, dout, logits, start, length)[0], **case.tolerance)


class Paged(NamedTuple):
    """A case whose keys are in pages, and how many of each row's queries are real."""

    case: Case
    page_size: int
    start: list[int]
    length: list[int]
    cache_dtype: str = "float32"

    def arrays(self):
        """What the op takes, and the same keys and values in rows. What no query sees is NaN, and pages of nothing else
        are page 0."""
        case, rows = self.case, len(self.start)
        q, k, v, *_ = case.arrays(rows=rows)
        kv = np.stack([k, v], axis=2).astype(self.cache_dtype)  # [b, s, 2, g, k]
        pages = case.keys // self.page_size
        pool = np.full((rows * pages + 1, 2 * case.groups, self.page_size, case.k_width), np.nan, kv.dtype)
        table = np.zeros((rows, pages), np.int32)
        free = list(np.random.default_rng(5).permutation(rows * pages) + 1)
        for row, (start, length) in enumerate(zip(self.start, self.length, strict=True)):
            for s in range(start + length):
                if s < case.sinks or start - s < (case.window or np.inf):
                    page, slot = divmod(s, self.page_size)
                    table[row, page] = table[row, page] or free.pop()
                    pool[table[row, page], :, slot] = kv[row, s].reshape(2 * case.groups, -1)
        where = (jnp.array(x, jnp.int32) for x in (self.start, self.length))
        return (q, jnp.asarray(pool), jnp.asarray(table), *where), (q, kv[:, :, 0], kv[:, :, 1])


DECODE = Case(1, 78, 6, 2, 24, 24, window=13, sinks=3, has_logits=True)
PAGED = {
    "decode": Paged(DECODE, 6, [60, 7, 0, 5], [1, 1, 1, 0]),
    "decode, in splits": Paged(DECODE._replace(keys=600, window=None, sinks=0), 6, [599, 70, 0, 5], [1, 1, 1, 0]),
    "cache of another dtype": Paged(DECODE._replace(dtype="bfloat16"), 16, [60, 7], [1, 1]),
    "chunk": Paged(SMALL._replace(keys=144, v_width=24, sinks=3), 6, [101, 0, 7], [40, 11, 0]),
}


@pytest.mark.parametrize("name", PAGED)
@pytest.mark.parametrize("impl", ["xla", "interpret", "reference"])
def test_paged_form_equals_float64_loop(impl, name):
    paged = PAGED[name]
    case, logits = paged.case, paged.case.arrays()[-1]
    arrays, (q, k, v) = paged.arrays()
    end = np.array(paged.start) + paged.length
    want = loop64(case, q, k, v, np.zeros(q.shape), logits, paged.start, end)[0]
    want[np.arange(case.queries) >= np.array(paged.length)[:, None]] = 0
    options = {"window": case.window, "sinks": case.sinks, "sink_logits": logits, "scale": SCALE}
    op = paged_sliding_window_reference if impl == "reference" else partial(paged_sliding_window, impl=impl)
    got = jax.jit(partial(op, **options))(*arrays)
    assert got.dtype == q.dtype
    assert_close(got, want, **case.tolerance)


def test_bad_arguments_are_refused():
    q, k, v, _, _ = SMALL.arrays()
    where = jnp.zeros(2, jnp.int32), jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match="interpret"):
        sliding_window(q, k, v, *where, window=4, scale=SCALE, impl="cuda")
    with pytest.raises(ValueError, match="at least 1"):
        sliding_window(q, k, v, *where, window=0, scale=SCALE)
    with pytest.raises(ValueError, match="5 heads cannot share 2"):
        sliding_window(q[:, :, :5], k, v, *where, window=4, scale=SCALE)
    with pytest.raises(ValueError, match="5 heads cannot share 2"):
        paged_sliding_window(
            q[:, :, :5], jnp.zeros((3, 4, 8, 24)), jnp.zeros((2, 1), jnp.int32), *where, window=4, scale=SCALE
        )
