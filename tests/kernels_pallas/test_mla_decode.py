"""Every form of latent decode attention against a float64 loop over each query's keys, page by page, NaN all around."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas.mla_decode import mla_decode, mla_decode_reference
from kernels_pallas.online_softmax import base2, merge, natural

from .compare import assert_close

pytestmark = pytest.mark.usefixtures("quick_compile")

LATENT, ROTARY = 32, 8
SCALE = 0.3
TOLERANCE = {
    jnp.float32: {"absolute": 2e-5, "relative": 2e-5, "cosine": 1e-9},
    jnp.bfloat16: {"absolute": 0.02, "relative": 0.02, "cosine": 1e-4},
}


@partial(jax.jit, static_argnames=("impl", "window", "sinks", "block_size"))
def run(q: Any, pool: Any, table: Any, start: Any, arrays: dict[str, jax.Array], *, impl: str, **options: Any) -> Any:
    form = mla_decode_reference if impl == "reference" else partial(mla_decode, impl=impl)
    return form(q, pool, table, start, latent=LATENT, scale=SCALE, **arrays, **options)


class Case:
    """Rows of `lengths` tokens in the cache, of which the last are the t queries'; where no token is there is NaN."""

    def __init__(
        self,
        lengths: list[int],
        *,
        t: int,
        heads: int,
        page_size: int,
        width: int = 8,
        pages: int = 40,
        seed: int = 0,
        dtype: Any = jnp.float32,
    ) -> None:
        rng = np.random.default_rng(seed)
        free = iter(rng.permutation(np.arange(1, pages)))
        self.q = jnp.asarray(rng.standard_normal((len(lengths), t, heads, LATENT + ROTARY)), dtype)
        pool = np.full((pages, 1, page_size, LATENT + ROTARY), np.nan)
        table = np.zeros((len(lengths), width), np.int32)
        for row, length in enumerate(lengths):
            for page in range(-(-max(length, 0) // page_size)):
                table[row, page] = next(free)
                filled = min(length - page * page_size, page_size)
                pool[table[row, page], 0, :filled] = rng.standard_normal((filled, LATENT + ROTARY))
        self.pool, self.table = jnp.asarray(pool, dtype), table
        self.start = np.array(lengths, np.int32) - t

    def forget(self, keep: Any) -> "Case":
        """NaN at every position of a row for which not keep(row, position)."""
        pool = np.array(self.pool.astype(jnp.float32))
        for row, pages in enumerate(self.table):
            for at in range(len(pages) * pool.shape[2]):
                page = pages[at // pool.shape[2]]
                if page and not keep(row, at):
                    pool[page, 0, at % pool.shape[2]] = np.nan
        self.pool = jnp.asarray(pool, self.pool.dtype)
        return self

    def want(self, sees: Any = lambda row, query, key: True) -> tuple[np.ndarray, np.ndarray]:
        q, pool = (np.asarray(x.astype(jnp.float32), np.float64) for x in (self.q, self.pool))
        out, lse = np.zeros((*q.shape[:3], LATENT)), np.full(q.shape[:3], -np.inf)
        for row, i, head in np.ndindex(q.shape[:3]):
            p = self.start[row] + i
            keys = [key for key in range(p + 1) if sees(row, p, key)]
            held = [pool[self.table[row, key // pool.shape[2]], 0, key % pool.shape[2]] for key in keys]
            if held:
                weights = np.exp(SCALE * np.array(held) @ q[row, i, head])
                lse[row, i, head] = np.log(weights.sum())
                out[row, i, head] = weights @ np.array(held)[:, :LATENT] / weights.sum()
        return out, lse

    def got(self, impl: str, **options: Any) -> tuple[jax.Array, jax.Array]:
        arrays = {k: jnp.asarray(options.pop(k), jnp.int32) for k in ("length", "blocks", "count") if k in options}
        rows = self.q, self.pool, jnp.asarray(self.table), jnp.asarray(self.start)
        return run(*rows, arrays, impl=impl, **options)

    def check(self, impl: str, sees: Any = lambda row, query, key: True, **options: Any) -> None:
        (out, lse), (want, want_lse) = self.got(impl, **options), self.want(sees)
        assert out.dtype == self.q.dtype
        assert lse.dtype == jnp.float32
        assert_close(out, want, **TOLERANCE[self.q.dtype.type])
        seen = np.isfinite(want_lse)
        assert (np.asarray(lse)[~seen] == -np.inf).all()
        assert_close(np.asarray(lse)[seen], want_lse[seen], **TOLERANCE[self.q.dtype.type])


each_impl = pytest.mark.parametrize("impl", ["xla", "interpret"])


@each_impl
@pytest.mark.parametrize(
    ("lengths", "t", "heads", "page_size", "dtype"),
    [
        ([37, 0, 1, 300], 1, 5, 64, jnp.float32),
        ([37, 5, 18, 128], 3, 16, 16, jnp.bfloat16),
        ([150], 2, 128, 24, jnp.float32),
    ],
)
def test_queries_see_their_rows_past(lengths, t, heads, page_size, dtype, impl) -> None:
    Case(lengths, t=t, heads=heads, page_size=page_size, dtype=dtype).check(impl)


@each_impl
@pytest.mark.parametrize(("window", "sinks"), [(40, 5), (1, 0), (16, 64)])
def test_a_window_hides_what_lies_between_it_and_the_sinks(window, sinks, impl) -> None:
    def sees(row: int, query: int, key: int) -> bool:
        return key > query - window or key < sinks

    case = Case([200, 3, 33, 70], t=2, heads=3, page_size=16, width=13)
    case.forget(lambda row, at: sees(row, case.start[row], at)).check(impl, sees, window=window, sinks=sinks)


@each_impl
@pytest.mark.parametrize(("block_size", "page_size"), [(64, 16), (24, 40)])
def test_of_a_list_of_blocks_each_counts_once(block_size, page_size, impl) -> None:
    last = -(-250 // block_size) - 1
    blocks = [[last, 0, 2, 0, 1], [1, -1, 0, 99, 2], [3, 3, 3, 3, 3], [0, 1, 2, 3, 0]]
    count = [5, 4, 5, 0]

    def sees(row: int, query: int, key: int) -> bool:
        return key // block_size in blocks[row][: count[row]]

    case = Case([250, 90, 50, 33], t=2, heads=3, page_size=page_size, width=16, dtype=jnp.bfloat16)
    case.forget(lambda row, at: sees(row, 0, at))
    case.check(impl, sees, blocks=blocks, count=count, block_size=block_size)


@pytest.mark.parametrize("impl", ["reference", "xla", "interpret"])
def test_all_that_hides_keys_holds_together(impl) -> None:
    case = Case([70, 0, 23], t=2, heads=3, page_size=16)
    length = [1, 0, 2]

    def sees(row: int, query: int, key: int) -> bool:
        listed, behind = key // 16 in (0, 1, 4), key >= case.start[row] + length[row]
        return listed and not behind and (key > query - 9 or key < 4)

    case.forget(lambda row, at: sees(row, case.start[row], at))
    blocks = {"blocks": [[4, 0, 1, 4, 2]] * 3, "count": [4, 4, 4], "block_size": 16}
    case.check(impl, sees, length=length, window=9, sinks=4, **blocks)


@each_impl
def test_what_lies_behind_a_rows_real_tokens_is_not_read(impl) -> None:
    """Its other queries are padding, and see what the last real one sees."""
    case = Case([60, 44, 2, 3], t=3, heads=3, page_size=16)
    length = [3, 1, 2, 0]
    ends = [start + n for start, n in zip(case.start, length, strict=True)]
    case.forget(lambda row, at: at < ends[row]).check(impl, lambda row, query, key: key < ends[row], length=length)


@each_impl
def test_a_pool_of_few_bits_serves_queries_of_many(impl) -> None:
    case = Case([60, 44], t=1, heads=3, page_size=16, dtype=jnp.bfloat16)
    case.q = case.q.astype(jnp.float32)
    case.check(impl)


@settings(deadline=None, max_examples=25, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 96), min_size=2, max_size=2),
    blocks=st.lists(st.lists(st.integers(-1, 9), min_size=4, max_size=4), min_size=2, max_size=2),
    count=st.lists(st.integers(0, 4), min_size=2, max_size=2),
    seed=st.integers(0, 9),
)
def test_any_lengths_and_lists(lengths, blocks, count, seed) -> None:
    def sees(row: int, query: int, key: int) -> bool:
        return key // 12 in blocks[row][: count[row]]

    case = Case(lengths, t=2, heads=3, page_size=16, width=6, pages=14, seed=seed)
    case.check("interpret")
    case.check("xla")
    case.forget(lambda row, at: sees(row, 0, at))
    for impl in ("interpret", "xla"):
        case.check(impl, sees, blocks=blocks, count=count, block_size=12)


def test_results_over_apart_sets_of_keys_merge() -> None:
    case = Case([90, 20, 0], t=2, heads=3, page_size=16)
    halves = [[[0, 1], [0, 1], [0, 1]], [[2, 3], [2, 3], [2, 3]]]
    results = [case.got("auto", blocks=blocks, count=[2, 2, 2], block_size=32) for blocks in halves]
    outs, lses = (jnp.stack(x) for x in zip(*results, strict=True))
    out, lse = merge(outs, base2(lses))
    want, want_lse = case.want()
    assert_close(out, want, **TOLERANCE[jnp.float32])
    np.testing.assert_allclose(natural(lse), want_lse, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"impl": "magic"}, "'pallas' or 'interpret'"),
        ({"latent": 40}, "latent is 40"),
        ({"window": 0}, "window is 0"),
        ({"sinks": -1}, "sinks is -1"),
        ({"blocks": jnp.zeros((1, 2), jnp.int32)}, "go together"),
        ({"block_size": 0}, "block_size is 0"),
        ({"pool": jnp.zeros((2, 2, 16, 40))}, r"must be \[pages, 1, page_size, 40\]"),
    ],
)
def test_a_bad_argument_is_refused(options, message) -> None:
    case = Case([3], t=1, heads=2, page_size=16)
    arguments = {"pool": case.pool, "latent": LATENT, "scale": SCALE} | options
    with pytest.raises(ValueError, match=message):
        mla_decode(case.q, page_table=jnp.asarray(case.table), start=jnp.asarray(case.start), **arguments)
