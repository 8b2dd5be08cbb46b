"""Moves keep their order, so a page may be reused the moment its read is queued."""

import numpy as np

from serving.batch import PAGES_AT_ONCE
from serving.engine.host_tier import Content
from serving.engine.page_moves import PageMoves
from tests.fakes import FakeRunner

PAGE_BYTES = 16


def content(value: int) -> Content:
    return np.full(PAGE_BYTES, value, np.uint8)


def test_a_page_is_read_before_it_is_written_anew() -> None:
    runner, moves = FakeRunner(page_size=4), PageMoves()
    runner.write_pages([3], content(1)[None])
    moves.read(b"old", 3)
    moves.write(3, content(2))
    moves.read(b"new", 3)
    assert (len(moves), moves.num_coming) == (3, 2)
    moves.dispatch(runner)
    assert {key: int(page[0]) for key, page in moves.finished(wait=False)} == {b"old": 1, b"new": 2}
    assert (len(moves), moves.num_coming) == (0, 0)


def test_many_pages_go_in_calls_of_a_fixed_size() -> None:
    runner, moves = FakeRunner(page_size=4), PageMoves()
    for page in range(1, 21):
        moves.write(page, content(page))
    moves.dispatch(runner)
    assert runner.num_writes == -(-20 // PAGES_AT_ONCE)
    for page in range(1, 21):
        moves.read(bytes([page]), page)
    moves.dispatch(runner)
    assert runner.num_reads == -(-20 // PAGES_AT_ONCE)
    assert [int(page[0]) for _, page in moves.finished(wait=True)] == list(range(1, 21))


def test_nobody_waits_for_reads_unless_asked_to() -> None:
    runner, moves = FakeRunner(page_size=4), PageMoves()
    runner.reads_done = False
    moves.read(b"a", 1)
    moves.dispatch(runner)
    assert list(moves.finished(wait=False)) == []
    assert moves.is_coming(b"a")
    assert [key for key, _ in moves.finished(wait=True)] == [b"a"]
    assert not moves.is_coming(b"a")


def test_a_read_that_failed_is_a_miss_and_the_others_stand() -> None:
    runner, moves = FakeRunner(page_size=4), PageMoves()
    moves.read(b"a", 1)
    moves.dispatch(runner)
    runner._lost = True
    moves.read(b"b", 2)
    moves.dispatch(runner)
    assert [key for key, _ in moves.finished(wait=True)] == [b"a"]
    assert (len(moves), moves.num_coming) == (0, 0)


def test_clear_forgets_all() -> None:
    runner, moves = FakeRunner(page_size=4), PageMoves()
    moves.read(b"a", 1)
    moves.dispatch(runner)
    moves.read(b"b", 2)
    moves.write(3, content(3))
    moves.clear()
    moves.dispatch(runner)
    assert (len(moves), moves.num_coming, runner.num_writes) == (0, 0, 0)
    assert list(moves.finished(wait=True)) == []
