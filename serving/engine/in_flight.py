"""The steps that are on the device, oldest first, and what they tell about time.

A step begins when it is dispatched to a device that has nothing to do, else when the one before it ends; its end is
known only where the host had to wait for it. From such pairs `costs` learns what a bucket takes; where a step had ended
unnoticed, the device waited for the host, for as long as the step's usual time has been over.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from serving.batch import Kind, Pending, StepOutput

from .costs import StepCosts
from .stats import EngineStats
from .step import Step


@dataclass(slots=True)
class Out:
    step: Step
    pending: Pending
    began_s: float | None  # None: not known


class InFlight:
    def __init__(self, clock: Callable[[], float], stats: EngineStats, costs: StepCosts) -> None:
        self._clock, self._stats, self._costs = clock, stats, costs
        self._out: deque[Out] = deque()

    def __len__(self) -> int:
        return len(self._out)

    def __iter__(self) -> Iterator[Out]:
        return iter(self._out)

    def push(self, step: Step, pending: Pending) -> None:
        now_s = self._clock()
        waits = not self._out or self._out[-1].pending.done()
        if self._out and waits:
            self._stats.device_stall_s += self._overdue_s(self._out[-1], now_s)
        self._out.append(Out(step, pending, now_s if waits else None))

    def pop(self) -> Out:
        """The oldest step, to be read with `read`."""
        return self._out.popleft()

    def read(self, out: Out) -> StepOutput:
        """Wait for a step that was popped; raises what it raised."""
        ended = out.pending.done()
        result = out.pending.result()
        if not ended:
            now_s = self._clock()
            if out.began_s is not None:
                self._costs.observe(out.step.batch.bucket, now_s - out.began_s, _prefix(out.step))
            if self._out and self._out[0].began_s is None:
                self._out[0].began_s = now_s
        return result

    def keep(self, wanted: Callable[[Step], bool]) -> list[Out]:
        """Take out all steps that are not wanted."""
        dropped = [out for out in self._out if not wanted(out.step)]
        self._out = deque(out for out in self._out if wanted(out.step))
        return dropped

    def _overdue_s(self, out: Out, now_s: float) -> float:
        if out.began_s is None:
            return 0.0
        return max(0.0, now_s - out.began_s - self._costs.seconds(out.step.batch.bucket, _prefix(out.step)))


def _prefix(step: Step) -> int:
    """Of prompts; a decode step's time follows its rows as they grow."""
    return max(step.starts) if step.kind is Kind.EXTEND else 0
