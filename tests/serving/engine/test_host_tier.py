"""Host memory for pages: the bound, what goes first, and what stays."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from serving.engine.host_tier import Content, HostTier


def page(value: int, size: int = 10) -> Content:
    return np.full(size, value, np.uint8)


def key(number: int) -> bytes:
    return bytes([number])


def test_the_longest_unused_goes_and_a_copy_is_kept() -> None:
    tier = HostTier(30)
    source = page(1)
    assert tier.put(key(1), source)
    source[:] = 9
    assert tier.put(key(2), page(2))
    assert tier.put(key(3), page(3))
    (found,) = tier.match([key(1), key(7)])
    assert found.tolist() == [1] * 10
    assert tier.put(key(4), page(4))
    assert [n for n in range(1, 5) if key(n) in tier] == [1, 3, 4]
    assert tier.count([key(1), key(3), key(2), key(4)]) == 2
    assert tier.num_bytes == 30


def test_pinned_pages_stay_until_every_owner_lets_go() -> None:
    tier = HostTier(20)
    tier.pin("a", [key(1), key(2)])
    tier.pin("a", [key(5)])  # once an owner
    tier.pin("b", [key(1)])
    tier.put(key(1), page(1))
    tier.put(key(2), page(2))
    assert not tier.put(key(3), page(3))
    tier.discard([key(1)])
    tier.unpin("a")
    tier.unpin("a")
    assert tier.put(key(3), page(3))
    assert tier.put(key(4), page(4))
    assert [n for n in range(1, 6) if key(n) in tier] == [1, 4]
    tier.unpin("b")
    tier.discard([key(1), key(4), key(9)])
    assert tier.num_bytes == 0


def test_a_chain_loses_its_tail_first() -> None:
    tier = HostTier(30)
    for n in (1, 2, 3):
        tier.put(key(n), page(n))
    tier.match([key(1), key(2), key(3)])
    tier.put(key(4), page(4))
    assert tier.count([key(1), key(2), key(3)]) == 2


def test_a_tier_of_no_bytes_takes_nothing() -> None:
    assert not HostTier(0).put(key(1), page(1))


@given(
    st.integers(0, 60),
    st.lists(st.tuples(st.sampled_from(["put", "pin", "unpin", "discard", "match"]), st.integers(0, 9)), max_size=60),
)
def test_bytes_add_up_and_pinned_pages_are_never_evicted(capacity: int, events: list[tuple[str, int]]) -> None:
    tier, pinned = HostTier(capacity), set[int]()
    for what, n in events:
        held = {m for m in pinned if key(m) in tier}
        if what == "put":
            tier.put(key(n), page(n))
        elif what == "match":
            assert [a[0] for a in tier.match([key(n)])] == ([n] if key(n) in tier else [])
        elif what == "discard":
            tier.discard([key(n)])
        elif what == "pin":
            tier.pin(n, [key(n)])
            pinned.add(n)
        else:
            tier.unpin(n)
            pinned.discard(n)
            held.discard(n)
        assert all(key(m) in tier for m in held)
        assert tier.num_bytes == 10 * sum(key(m) in tier for m in range(10)) <= capacity
