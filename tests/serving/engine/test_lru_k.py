"""LRU-K eviction, against a naive model that keeps bursts of uses and looks at every key."""

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given

from serving.engine.lru_k import LruK

NEVER = float("-inf")


class Naive:
    """The paper's definition by brute force: all bursts of every key, the victim by a look at all offered keys."""

    def __init__(self, k: int, correlated_s: float, max_history: int) -> None:
        self.k, self.correlated_s, self.max_history, self.turn = k, correlated_s, max_history, 0
        self.bursts, self.offered, self.held, self.ghosts = {}, {}, set(), []  # type: ignore[var-annotated]

    def reference(self, key: int, now_s: float) -> None:
        bursts = self.bursts.setdefault(key, [])
        if bursts and now_s - bursts[-1][1] <= self.correlated_s:
            bursts[-1] = (bursts[-1][0], now_s)
        else:
            bursts.append((now_s, now_s))
        if key in self.offered:
            self.offer(key, self.offered[key][0])
        elif key not in self.held:
            self.remember(key)

    def offer(self, key: int, depth: int = 0) -> None:
        self.leave(key)
        self.turn += 1
        self.offered[key] = (depth, self.turn)

    def withdraw(self, key: int) -> None:
        self.leave(key)
        self.held.add(key)

    def forget(self, key: int) -> None:
        self.leave(key)
        self.bursts.pop(key, None)

    def leave(self, key: int) -> None:
        self.offered.pop(key, None)
        self.held.discard(key)
        self.ghosts = [ghost for ghost in self.ghosts if ghost != key]

    def remember(self, key: int) -> None:
        self.leave(key)
        self.ghosts.append(key)
        for ghost in self.ghosts[: max(0, len(self.ghosts) - self.max_history)]:
            self.forget(ghost)

    def victim(self) -> int | None:
        def order(key: int) -> tuple[bool, float, int, int]:
            bursts, (depth, turn) = self.bursts.get(key, []), self.offered[key]
            if len(bursts) < self.k:
                return (False, bursts[-1][1] if bursts else NEVER, -depth, turn)
            kth = bursts[-self.k][0] + sum(end - start for start, end in bursts[-self.k : -1])
            return (True, kth, -depth, turn)

        chosen = min(self.offered, key=order, default=None)
        if chosen is not None:
            self.remember(chosen) if chosen in self.bursts else self.leave(chosen)
        return chosen


Event = tuple[str, int, int]  # what, key, depth or seconds since the event before


def replay(events: list[Event], k: int, correlated_s: float, max_history: int) -> LruK[int]:
    """Both through the same events, equal in every victim and in the number of offered keys."""
    real: LruK[int] = LruK(k, correlated_s=correlated_s, max_history=max_history)
    naive, now_s = Naive(k, correlated_s, max_history), 0
    for what, key, number in events:
        if what == "reference":
            now_s += number
            real.reference(key, now_s)
            naive.reference(key, now_s)
        elif what == "offer":
            real.offer(key, number)
            naive.offer(key, number)
        elif what == "victim":
            assert real.victim() == naive.victim()
        else:
            getattr(real, what)(key)
            getattr(naive, what)(key)
        assert len(real) == len(naive.offered)
    return real


def test_equals_the_naive_model_over_100_000_operations() -> None:
    rng = random.Random(36)
    verbs = rng.choices(
        ["reference", "offer", "withdraw", "victim", "forget"], weights=[40, 30, 12, 16, 2], k=100_000
    )  # fmt: skip
    replay([(verb, min(rng.randrange(50), rng.randrange(50)), rng.randrange(4)) for verb in verbs], 3, 5, 12)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["reference", "reference", "offer", "offer", "withdraw", "victim", "victim", "forget"]),
        st.integers(0, 5),
        st.integers(0, 3),
    ),
    max_size=80,
)


@given(EVENTS, st.integers(1, 4), st.sampled_from([0, 1, 4]), st.integers(0, 4))
def test_equals_the_naive_model(events: list[Event], k: int, correlated_s: float, max_history: int) -> None:
    replay(events, k, correlated_s, max_history)


@given(EVENTS, st.integers(0, 4))
def test_what_is_remembered_of_keys_that_nobody_holds_is_bounded(events: list[Event], max_history: int) -> None:
    real = replay(events, 2, 1, max_history)
    assert len(real._uses) <= len(real) + len(real._held) + max_history


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), max_size=60))
def test_every_offered_key_is_a_victim_once_and_no_other_is(offers: list[tuple[int, int]]) -> None:
    policy: LruK[int] = LruK(correlated_s=0, max_history=0)
    for key, depth in offers:
        policy.offer(key, depth)
    victims = [policy.victim() for _ in range(len(policy))]
    assert sorted(victims) == sorted({key for key, _ in offers})  # type: ignore[type-var]
    assert policy.victim() is None


def test_a_burst_counts_once_and_a_scan_leaves_what_is_used_again() -> None:
    """A36: P 3 times in 5 ms, Q 3 times in 30 s."""
    policy: LruK[str] = LruK(correlated_s=1.0, max_history=100)
    for now_s in (0.0, 15.0, 30.0):
        policy.reference("Q", now_s)
    for now_s in (40.0, 40.0025, 40.005):
        policy.reference("P", now_s)
    policy.offer("Q")
    policy.offer("P")
    for page in range(10_000):
        policy.reference(f"scan {page}", 50.0 + page)
        policy.offer(f"scan {page}")
        assert policy.victim() == ("P" if page == 0 else f"scan {page - 1}")
    assert policy.victim() == "scan 9999"
    assert policy.victim() == "Q"
    assert policy.victim() is None
    assert len(policy._uses) == 100  # what is left of 10,002 keys


def test_keys_in_use_are_never_evicted() -> None:
    policy: LruK[str] = LruK(correlated_s=0, max_history=10)
    for key in "ab":
        policy.reference(key, 1.0)
        policy.offer(key)
    policy.withdraw("a")
    assert [policy.victim(), policy.victim()] == ["b", None]
    policy.offer("a")
    assert policy.victim() == "a"


def test_an_evicted_key_that_comes_back_has_its_history() -> None:
    policy: LruK[str] = LruK(2, correlated_s=0, max_history=10)
    policy.reference("old", 1.0)
    policy.offer("old")
    assert policy.victim() == "old"
    policy.reference("old", 5.0)  # its second use
    policy.offer("old")
    policy.reference("new", 6.0)
    policy.offer("new")
    assert policy.victim() == "new"


def test_of_keys_used_together_the_deepest_goes_first() -> None:
    policy: LruK[str] = LruK(correlated_s=0, max_history=10)
    for depth, key in enumerate(["head", "middle", "tail"]):
        policy.reference(key, 7.0)
        policy.offer(key, depth)
    assert [policy.victim() for _ in range(3)] == ["tail", "middle", "head"]


def test_a_key_that_is_used_while_offered_stays_offered() -> None:
    policy: LruK[str] = LruK(correlated_s=0, max_history=10)
    for key in "ab":
        policy.reference(key, 1.0)
        policy.offer(key)
    policy.reference("a", 2.0)
    assert [policy.victim(), policy.victim()] == ["b", "a"]


def test_the_heap_does_not_grow_with_uses() -> None:
    policy: LruK[int] = LruK(correlated_s=0, max_history=10)
    for key in range(10):
        policy.offer(key)
    for turn in range(10_000):
        policy.reference(turn % 10, float(turn))
    assert len(policy._heap) < 100


@pytest.mark.parametrize("wrong", [{"k": 0}, {"correlated_s": -1.0}, {"max_history": -1}])
def test_impossible_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        LruK(**({"correlated_s": 0.0, "max_history": 0} | wrong))  # type: ignore[arg-type]
