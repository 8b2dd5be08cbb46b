"""Drafts go on while enough of them are right, and get another chance where they were not."""

import pytest

from serving.batch import Kind
from serving.engine.payoff import Payoff
from tests.fakes_engine import TurnedEngine, generate_row


def drafts(payoff: Payoff, rate: float, count: int = 1000) -> int:
    """Judged until it is paused, at most `count`."""
    for number in range(count):
        if payoff.paused:
            return number
        payoff.judge(accepted=int((number + 1) * rate) > int(number * rate))
    return count


def pause_of(payoff: Payoff) -> int:
    pause = 0
    while payoff.paused:
        payoff.skip()
        pause += 1
    return pause


@pytest.mark.parametrize(("rate", "pays"), [(0.0, False), (0.28, False), (0.4, True), (0.9, True)])
def test_they_go_on_while_a_third_is_right(rate: float, pays: bool) -> None:
    judged = drafts(Payoff(), rate)
    assert judged == 1000 if pays else judged < 100


def test_pauses_double_and_are_short_again_once_drafts_have_paid() -> None:
    payoff, pauses = Payoff(), []
    for rate in (0.0, 0.0, 0.0, 1.0, 0.0):
        drafts(payoff, rate, 64)
        pauses.append(pause_of(payoff))
    first = pauses[0]
    assert first > 100
    assert pauses == [first, 2 * first, 4 * first, 0, first]


def test_pauses_are_bounded() -> None:
    payoff, longest = Payoff(), 0
    for _ in range(20):
        drafts(payoff, 0.0)
        longest = max(longest, pause_of(payoff))
    assert longest == 8192


def test_an_engine_whose_drafts_are_wrong_decodes_plainly() -> None:
    engine = TurnedEngine(speculate_rows=1, draft_rate=0.1)
    for number in range(12):
        (row,) = engine.submit(generate_row((5, number + 9), 40))
        engine.run()
        assert engine.tokens(row) == engine.model.generate((5, number + 9), 40)
    steps = engine.stats.steps
    assert 0.05 < steps[Kind.SPECULATE] / (steps[Kind.SPECULATE] + steps[Kind.DECODE]) < 0.4
