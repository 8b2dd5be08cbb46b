"""Whether drafts are worth their price: the tokens that they gain against the time that speculative steps take longer.

Judged over windows of drafts, by what steps of either kind take on this device (`costs`). Where a window did not pay,
generation is plain for a while, twice as long each time, and then drafts get another window: how often they are right
depends on what is being written.
"""

from serving.batch import Bucket

from .costs import StepCosts

_WINDOW = 48  # drafts
_FIRST_PAUSE, _LONGEST_PAUSE = 256, 8192  # plain steps


class Payoff:
    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._num_drafts, self._gained_s = 0, 0.0  # of this window
        self._pause, self._left = _FIRST_PAUSE, 0

    @property
    def paused(self) -> bool:
        return self._left > 0

    def skip(self) -> None:
        """A plain step that might have had drafts."""
        self._left = max(0, self._left - 1)

    def judge(self, speculative: Bucket, plain: Bucket, *, accepted: bool) -> None:
        """A draft that was checked in a step of bucket `speculative`, where `plain` would have done."""
        plain_s = self._costs.seconds(plain)
        self._gained_s += accepted * plain_s - (self._costs.seconds(speculative) - plain_s)
        self._num_drafts += 1
        if self._num_drafts == _WINDOW:
            self._close_window()

    def _close_window(self) -> None:
        if self._gained_s < 0:
            self._left, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
        else:
            self._pause = _FIRST_PAUSE
        self._num_drafts, self._gained_s = 0, 0.0
