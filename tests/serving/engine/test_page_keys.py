"""Keys of KV pages: equal exactly for equal tenants and equal tokens up to the page's end."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from serving.engine.page_keys import KEY_BYTES, chain, next_key, root_key

TOKENS = st.lists(st.integers(0, 3), max_size=20)
TENANTS = st.text("ab", max_size=3)


def keys(tenant: str, tokens: list[int], page_size: int) -> list[bytes]:
    return chain(tenant, np.array(tokens, np.int32), page_size)


@given(TENANTS, TOKENS, TENANTS, TOKENS, st.integers(1, 5))
def test_keys_are_equal_where_tenant_and_prefix_are(a: str, x: list[int], b: str, y: list[int], size: int) -> None:
    left, right = keys(a, x, size), keys(b, y, size)
    assert len(left) == len(x) // size
    for place, (p, q) in enumerate(zip(left, right, strict=False)):
        end = (place + 1) * size
        assert (p == q) == (a == b and x[:end] == y[:end])


def test_a_chain_goes_on_where_it_ended() -> None:
    tokens = np.arange(12, dtype=np.int32)
    longer = chain("t", tokens, 4)
    assert longer == [*chain("t", tokens[:8], 4), next_key(longer[1], tokens[8:])]
    assert longer[0] == next_key(root_key("t"), tokens[:4])
    assert {len(key) for key in longer} == {KEY_BYTES}
