"""Drafts go on while they pay, and get another chance where they did not."""

import pytest

from serving.batch import Bucket, Kind
from serving.engine.costs import StepCosts
from serving.engine.payoff import Payoff
from tests.fakes_engine import TurnedEngine, generate_row

PLAIN, SPECULATIVE = Bucket(Kind.DECODE, 1, 1, 4), Bucket(Kind.SPECULATE, 1, 2, 4)


def payoff_of(plain_s: float, speculative_s: float) -> Payoff:
    costs = StepCosts()
    costs.observe(PLAIN, plain_s)
    costs.observe(SPECULATIVE, speculative_s)
    return Payoff(costs)


def drafts(payoff: Payoff, rate: float, count: int = 1000) -> int:
    """Judged until it is paused, at most `count`."""
    for number in range(count):
        if payoff.paused:
            return number
        payoff.judge(SPECULATIVE, PLAIN, accepted=int((number + 1) * rate) > int(number * rate))
    return count


@pytest.mark.parametrize("ratio", [1.1, 1.3, 1.6])
def test_they_pay_where_they_gain_more_tokens_than_the_steps_take_longer(ratio: float) -> None:
    assert drafts(payoff_of(1.0, ratio), ratio - 1 + 0.05) == 1000
    assert drafts(payoff_of(1.0, ratio), ratio - 1 - 0.05) < 100


def test_pauses_double_and_are_short_again_once_drafts_have_paid() -> None:
    payoff = payoff_of(1.0, 1.5)
    pauses = []
    for rate in (0.0, 0.0, 0.0, 1.0, 0.0):
        pause = 0
        drafts(payoff, rate, 96)
        while payoff.paused:
            payoff.skip()
            pause += 1
        pauses.append(pause)
    first = pauses[0]
    assert pauses == [first, 2 * first, 4 * first, 0, first]
    assert first > 100


def test_pauses_are_bounded() -> None:
    payoff, longest = payoff_of(1.0, 2.0), 0
    for _ in range(20):
        drafts(payoff, 0.0)
        pause = 0
        while payoff.paused:
            payoff.skip()
            pause += 1
        longest = max(longest, pause)
    assert longest == 8192


def test_while_nothing_is_known_of_the_steps_drafts_go_on() -> None:
    payoff = Payoff(StepCosts())
    assert drafts(payoff, 0.0) == 1000


def test_an_engine_whose_drafts_are_wrong_decodes_plainly() -> None:
    """A speculative step takes twice a plain one's time here."""
    engine = TurnedEngine(speculate_rows=1, draft_rate=0.1, ms_per_token=1.0)
    for number in range(12):
        (row,) = engine.submit(generate_row((5, number + 9), 40))
        engine.run()
        assert engine.tokens(row) == engine.model.generate((5, number + 9), 40)
    steps = engine.stats.steps
    share = steps[Kind.SPECULATE] / (steps[Kind.SPECULATE] + steps[Kind.DECODE])
    assert 0.05 < share < 0.3
