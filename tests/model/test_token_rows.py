"""A step's tokens as rows of their own."""

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings

from model.cache import PageView
from model.token_rows import TokenRows, unpaged_view

LENGTHS = st.lists(st.integers(0, 4), min_size=1, max_size=4)


def view_of(lengths: list[int]) -> PageView:
    b = len(lengths)
    positions = 10 * np.arange(b)[:, None] + np.arange(4)[None, :]
    table = np.arange(b * 2, dtype=np.int32).reshape(b, 2)
    return PageView(jnp.asarray(table), jnp.asarray(positions, jnp.int32), jnp.asarray(lengths, jnp.int32))


@settings(max_examples=25, deadline=None)
@given(LENGTHS)
def test_real_tokens_come_first_in_their_order_with_their_own_pages(lengths):
    view = view_of(lengths)
    rows = TokenRows.of(view)
    wanted = [(r, 10 * r + i) for r, length in enumerate(lengths) for i in range(length)]
    assert int(rows.num_real) == len(wanted)
    assert np.asarray(rows.view.length).tolist() == [1] * len(wanted) + [0] * (4 * len(lengths) - len(wanted))
    for i, (row, position) in enumerate(wanted):
        assert int(rows.view.positions[i, 0]) == position
        np.testing.assert_array_equal(rows.view.page_table[i], view.page_table[row])
    assert not np.asarray(rows.view.positions)[len(wanted) :].any()


@settings(max_examples=25, deadline=None)
@given(LENGTHS)
def test_put_is_the_inverse_of_take(lengths):
    rows, values = TokenRows.of(view_of(lengths)), jnp.arange(len(lengths) * 8).reshape(-1, 4, 2)
    taken = rows.take(values)
    assert taken.shape == (len(lengths) * 4, 1, 2)
    np.testing.assert_array_equal(rows.put(taken, (len(lengths), 4)), values)


def test_a_step_without_a_cache_has_pages_of_its_own():
    view, num_pages = unpaged_view((2, 5), jnp.asarray([5, 3]), 4)
    assert num_pages == 5
    assert np.asarray(view.page_table).tolist() == [[1, 2], [3, 4]]
    assert np.asarray(view.positions).tolist() == [list(range(5))] * 2
