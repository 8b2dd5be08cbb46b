"""Whether drafts are worth their price: how many of them are right.

Judged over windows of drafts. Where fewer than LEAST of a window's were right, generation is plain for a while, twice
as long each time, and then drafts get another window: how often they are right depends on what is being written. The
bar is fixed. Times of steps, which would say it better, are known of one kind alone while that kind runs, and on a busy
machine two measured at different times do not compare: tried, and it paused drafts that paid.
"""

LEAST = 1 / 3  # a speculative step takes 1.1 to 1.5 times a plain one's time
_WINDOW = 64  # drafts
_FIRST_PAUSE, _LONGEST_PAUSE = 256, 8192  # plain steps


class Payoff:
    def __init__(self) -> None:
        self._num_drafts = self._num_accepted = 0  # of this window
        self._pause, self._left = _FIRST_PAUSE, 0

    @property
    def paused(self) -> bool:
        return self._left > 0

    def skip(self) -> None:
        """A plain step that might have had drafts."""
        self._left = max(0, self._left - 1)

    def judge(self, *, accepted: bool) -> None:
        """A draft that was checked."""
        self._num_drafts += 1
        self._num_accepted += accepted
        if self._num_drafts == _WINDOW:
            self._close_window()

    def _close_window(self) -> None:
        if self._num_accepted < LEAST * _WINDOW:
            self._left, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
        else:
            self._pause = _FIRST_PAUSE
        self._num_drafts = self._num_accepted = 0
