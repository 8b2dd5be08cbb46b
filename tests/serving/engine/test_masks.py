"""Constrained rows: never ahead of their mask, beside other rows that go on, whatever happens to them on the way."""

import threading
from collections.abc import Callable

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from serving.batch import Kind
from serving.engine.masks import Masks
from serving.engine.sequence import Sequence, make_sequences
from serving.errors import BadRequest, InternalError
from serving.types import Finish, Job, Prepared, Priority
from tests.fakes import ToyModel
from tests.fakes_constraint import Slotted
from tests.fakes_engine import TurnedEngine, generate_row
from tests.fakes_tables import RowTable

PROMPT = (3, 1, 4, 1, 5)


def sets(length: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.choice(320, rng.integers(1, 6), replace=False).tolist() for _ in range(length)]


def row_of(constraint: Slotted, prompt: tuple[int, ...] = PROMPT, max_tokens: int = 20, **params: object) -> Prepared:
    return generate_row(prompt, max_tokens, constraint=constraint, **params)


class Later:
    """Work that is done when the test says so."""

    def __init__(self) -> None:
        self.works: list[Callable[[], None]] = []

    def __call__(self, work: Callable[[], None]) -> None:
        self.works.append(work)

    def do(self) -> None:
        works, self.works = self.works, []
        for work in works:
            work()


def engine_with(later: Later, **options: object) -> TurnedEngine:
    engine = TurnedEngine(**options)  # type: ignore[arg-type]
    engine.scheduler._masks = Masks(later)
    return engine


def test_every_token_is_one_that_the_constraint_allows() -> None:
    engine = TurnedEngine()
    asked = [(Slotted(sets(n, n)), (n, 7, 9)) for n in (1, 2, 5, 12)]
    rows = engine.submit(*(row_of(constraint, prompt) for constraint, prompt in asked))
    engine.run()
    for row, (constraint, prompt) in zip(rows, asked, strict=True):
        assert engine.tokens(row) == constraint.reference(engine.model, prompt) == constraint.pushed
        assert engine.last(row).finish is Finish.STOP
        assert engine.last(row).tokens == (), "the end is told when the constraint has taken the last token"


def test_length_and_stop_tokens_end_it_too() -> None:
    engine = TurnedEngine()
    fixed = [[9], [8], [7], [6]]
    short, stopped = engine.submit(row_of(Slotted(fixed), max_tokens=2), row_of(Slotted(fixed), stop_token_ids=(7,)))
    engine.run()
    assert (engine.tokens(short), engine.last(short).finish) == ([9, 8], Finish.LENGTH)
    assert (engine.tokens(stopped), engine.last(stopped).finish) == ([9, 8, 7], Finish.STOP)


def test_other_rows_go_on_while_a_mask_is_found() -> None:
    later = Later()
    engine = engine_with(later)
    constraint = Slotted(sets(4))
    waiting, free = engine.submit(row_of(constraint), generate_row((2, 2), 12))
    for _ in range(20):
        engine.loop.turn()
    assert len(engine.tokens(waiting)) == 1, "its second token needs a mask"
    assert engine.tokens(free) == engine.model.generate((2, 2), 12)
    assert engine.loop.awaits_masks
    steps = len(engine.runner.batches)
    for _ in range(5):
        engine.loop.turn()
    assert len(engine.runner.batches) == steps
    while not engine.ended(waiting):
        later.do()
        for _ in range(3):
            engine.loop.turn()
    assert engine.tokens(waiting) == constraint.reference(engine.model, PROMPT)
    assert engine.loop.idle


def test_a_mask_goes_to_the_device_with_the_step_that_needs_it() -> None:
    engine = TurnedEngine()
    (row,) = engine.submit(row_of(Slotted([[5], [6]])))
    plain = engine.submit(generate_row((1,), 3))
    engine.run()
    with_masks = [batch for batch in engine.runner.batches if batch.set_masks]
    assert [batch.bucket.kind for batch in with_masks] == [Kind.EXTEND, Kind.DECODE]
    assert [len(batch.set_tables) for batch in with_masks] == [1, 0]
    assert engine.tokens(row) == [5, 6]
    assert len(engine.tokens(plain[0])) == 3


def test_a_row_that_makes_room_goes_on_where_it_was() -> None:
    """Few pages: rows are stopped and resumed, with tokens unread and masks on their way."""
    later = Later()
    engine = engine_with(later, num_pages=9)
    asked = [(Slotted(sets(14, n)), (n, 7, 9, 1, 1, 2, n)) for n in range(4)]
    rows = engine.submit(*(row_of(constraint, prompt) for constraint, prompt in asked))
    for turn in range(2000):
        if engine.loop.idle:
            break
        engine.loop.turn()
        if turn % 3 == 0:
            later.do()
    assert engine.scheduler.num_preempted > 0
    for row, (constraint, prompt) in zip(rows, asked, strict=True):
        assert engine.tokens(row) == constraint.reference(engine.model, prompt) == constraint.pushed


def test_penalties_survive_making_room() -> None:
    few = tuple(range(20, 25))
    asked = [generate_row((n, 20, 21), 14, allowed_token_ids=few, frequency_penalty=0.9) for n in range(4)]
    roomy, tight = TurnedEngine(), TurnedEngine(num_pages=9)
    wanted, rows = roomy.submit(*asked), tight.submit(*asked)
    roomy.run()
    tight.run()
    assert tight.scheduler.num_preempted > 0
    assert roomy.scheduler.num_preempted == 0
    assert [tight.tokens(row) for row in rows] == [roomy.tokens(row) for row in wanted]


def penalised(model: ToyModel, asked: Prepared) -> list[int]:
    """The reference: greedy, adjusted as the definitions say."""
    s = asked.sampling
    assert s is not None
    table = RowTable(frozenset(asked.token_ids), allowed=frozenset(s.allowed_token_ids or ()))
    context = list(asked.token_ids)
    for _ in range(s.max_tokens):
        logits = table.adjusted(model.logprobs(context), s.repetition_penalty, s.presence_penalty, s.frequency_penalty)
        context.append(int(logits.argmax()))
        table.generated[context[-1]] += 1
    return context[len(asked.token_ids) :]


@settings(max_examples=25, deadline=None)
@given(
    events=st.lists(
        st.sampled_from(["constrained", "penalised", "plain", "cancel", "masks", "turn", "turn", "turn"]),
        min_size=8,
        max_size=50,
    ),
    seed=st.integers(0, 2**16),
)
def test_any_order_of_events_under_want_of_pages(events: list[str], seed: int) -> None:
    rng = np.random.default_rng(seed)
    later = Later()
    engine = engine_with(later, num_pages=9)
    wanted: dict[Sequence, list[int]] = {}
    for event in events:
        prompt = tuple(rng.integers(0, 320, rng.integers(1, 12)).tolist())
        priority = Priority(int(rng.integers(3)))
        if event == "constrained":
            constraint = Slotted(sets(int(rng.integers(1, 12)), seed))
            (row,) = engine.submit(row_of(constraint, prompt), priority=priority)
            wanted[row] = constraint.reference(engine.model, prompt)
        elif event == "penalised":
            few = tuple(rng.choice(320, 4, replace=False).tolist())
            asked = generate_row(prompt, 9, allowed_token_ids=few, repetition_penalty=1.4, frequency_penalty=0.7)
            (row,) = engine.submit(asked, priority=priority)
            wanted[row] = penalised(engine.model, asked)
        elif event == "plain":
            (row,) = engine.submit(generate_row(prompt, 9), priority=priority)
            wanted[row] = engine.model.generate(prompt, 9)
        elif event == "cancel" and wanted:
            row = list(wanted)[int(rng.integers(len(wanted)))]
            if not engine.ended(row):
                engine.cancel(row)
                del wanted[row]
        elif event == "masks":
            later.do()
        else:
            engine.loop.turn()
    for _ in range(3000):
        later.do()
        engine.loop.turn()
        if engine.loop.idle:
            break
    assert {row: engine.tokens(row) for row in wanted} == wanted
    assert (engine.pool.used, engine.scheduler.num_masks_out, engine.scheduler.num_running) == (0, 0, 0)


def test_a_constraint_that_breaks_ends_its_row_alone() -> None:
    engine = TurnedEngine()
    broken, good = engine.submit(row_of(Slotted(sets(5), fail_at=2)), row_of(Slotted(sets(5))))
    engine.run()
    assert isinstance(engine.last(broken).error, InternalError)
    assert len(engine.tokens(broken)) == 3
    assert engine.last(good).finish is Finish.STOP


def test_what_the_client_is_told_is_the_constraints_own_error() -> None:
    class Refuses(Slotted):
        def push(self, token_id: int) -> None:
            raise BadRequest("too complex", param="guided_regex")

    engine = TurnedEngine()
    (row,) = engine.submit(row_of(Refuses(sets(3))))
    engine.run()
    error = engine.last(row).error
    assert isinstance(error, BadRequest)
    assert error.param == "guided_regex"


def test_a_row_that_ends_while_its_mask_is_found_stays_ended() -> None:
    later = Later()
    engine = engine_with(later)
    (row,) = engine.submit(row_of(Slotted(sets(5))))
    for _ in range(5):
        engine.loop.turn()
    assert later.works
    engine.cancel(row)
    later.do()
    engine.loop.turn()
    assert engine.loop.idle
    assert not engine.loop.awaits_masks
    assert engine.pool.used == 0


def test_a_failed_step_and_the_rows_that_start_again() -> None:
    engine = TurnedEngine(fail_result=[3])
    constraints = [Slotted(sets(6, n)) for n in range(3)]
    rows = engine.submit(*(row_of(constraint, (n, 5)) for n, constraint in enumerate(constraints)))
    engine.run()
    for n, (row, constraint) in enumerate(zip(rows, constraints, strict=True)):
        want = constraint.reference(engine.model, (n, 5))
        assert engine.last(row).error is not None or engine.tokens(row) == want


def test_no_text_at_all_is_refused() -> None:
    with pytest.raises(BadRequest, match="no text"):
        make_sequences(None, Job("j", "t", (row_of(Slotted([])),)))


def test_waiting_is_for_all_that_are_out() -> None:
    started = threading.Event()

    def run(work: Callable[[], None]) -> None:
        threading.Thread(target=lambda: (started.wait(10), work())).start()

    masks = Masks(run)
    rows: tuple[Sequence, ...] = make_sequences(None, Job("j", "t", tuple(row_of(Slotted(sets(3))) for _ in range(3))))
    for row in rows:
        assert row.constraint is not None
        masks.start(row, sets(3)[0][0])
        assert row.mask is None
    assert masks.collect() == []
    started.set()
    masks.wait(10)
    assert masks.collect() == []
    assert masks.num_out == 0
    assert all(row.mask is not None for row in rows)
