import pytest

from serving.errors import StepFailed
from serving.pipeline.collect import Collected
from serving.types import Finish, Update


def test_rows_are_done_when_each_has_ended() -> None:
    collected = Collected(2)
    assert not collected.add([Update(1, target_logprobs=(-1.0,), finish=Finish.SCORED)])
    assert collected.add([Update(0, error=StepFailed("x"))])
    assert collected.rows[1].target_logprobs == (-1.0,)
    assert isinstance(collected.rows[0].error, StepFailed)


def test_a_scored_row_has_one_update() -> None:
    collected = Collected(1)
    with pytest.raises(AssertionError):
        collected.add([Update(0, target_logprobs=(-1.0,))])


def test_an_update_after_the_last_one_is_our_bug() -> None:
    collected = Collected(2)
    collected.add([Update(0, finish=Finish.SCORED)])
    with pytest.raises(AssertionError):
        collected.add([Update(0, finish=Finish.SCORED)])
