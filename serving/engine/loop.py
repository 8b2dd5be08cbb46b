"""One turn of the engine: dispatch a step, then read the one before it.

At most two steps are out at a time, and the host reads step k's tokens while step k+1 runs. A step that raises ends its
own rows; where it could write the KV cache, the others that have something there start again; the loop goes on. Pure
control flow: no thread, no lock, the clock is a parameter, so tests drive it turn by turn.
"""

import logging
from collections.abc import Callable

from serving.batch import Runner
from serving.errors import Cancelled, DeadlineExceeded, StepFailed

from .costs import StepCosts
from .in_flight import InFlight
from .scheduler import Events, Scheduler
from .stats import EngineStats
from .step import Step

_log = logging.getLogger("tidegate.engine")


class Loop:
    """`emit` gets the events of a turn, some rows' last ones among them, as soon as they are known."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        emit: Callable[[Events], None],
        *,
        clock: Callable[[], float],
        stats: EngineStats,
        costs: StepCosts | None = None,
    ) -> None:
        """`costs` learns what steps take."""
        self._runner, self._scheduler, self._forward = runner, scheduler, emit
        self._clock, self._stats = clock, stats
        self._in_flight = InFlight(clock, stats, costs or StepCosts())
        self._idle_since_s = clock()
        self._had_no_work = True

    def begin(self) -> None:
        """The device is ready: its time counts from now."""
        self._idle_since_s, self._had_no_work = self._clock(), True

    @property
    def idle(self) -> bool:
        """No row waits or runs, and neither a step nor a page is on its way."""
        rows = self._scheduler.num_waiting + self._scheduler.num_running
        return not self._in_flight and rows == 0 and not self._scheduler.tiers.busy

    @property
    def awaits_masks(self) -> bool:
        """Nothing is on the device, and rows would go on if they had their masks."""
        return not self._in_flight and self._scheduler.num_masks_out > 0

    @property
    def awaits_disk(self) -> bool:
        """Nothing is on the device, and rows would go on if the disk had brought their profiles."""
        return not self._in_flight and self._scheduler.tiers.awaits_disk

    def finish_moves(self) -> None:
        """Take in the pages that are still to come, and hand over what is to be written; no row is left."""
        self._move_pages(None)
        self._scheduler.tiers.collect(wait=True)

    def turn(self) -> None:
        """Expire rows, dispatch one step if there is one, and read the oldest if two are out or none was dispatched."""
        self._scheduler.tiers.collect(wait=False)
        now_s = self._clock()
        self.emit(self._scheduler.take_masks())
        self.emit(self._scheduler.expire(now_s))
        step = self._scheduler.next_batch(now_s, device_idle=not self._in_flight)
        step = self._move_pages(step)
        if step is not None:
            self._dispatch(step)
        if self._in_flight and (step is None or len(self._in_flight) > 1):
            self._retire()
        elif step is None:  # the device has nothing else to do
            self._scheduler.tiers.collect(wait=True)
        self._note_end_of_work()

    def emit(self, events: Events) -> None:
        """Count and pass on."""
        for _, update in events:
            self._stats.generated_tokens += len(update.tokens)
            if update.finish is not None:
                self._stats.finished_rows += 1
            elif isinstance(update.error, Cancelled):
                self._stats.cancelled_rows += 1
            elif isinstance(update.error, DeadlineExceeded):
                self._stats.expired_rows += 1
            elif update.error is not None:
                self._stats.failed_rows += 1
        if events:
            self._forward(events)

    def _move_pages(self, step: Step | None) -> Step | None:
        """Pages that `step` needs, or makes room for, move before it. Where that fails the KV cache is lost, the tiers
        are turned off, and a step that relied on them is none any more."""
        try:
            self._scheduler.tiers.dispatch(self._runner)
        except Exception as exc:  # border: as with steps
            _log.error("KV pages could not be moved; the tiers are off from now on", exc_info=exc)
            while self._in_flight:
                self._retire()
            self._scheduler.tiers.turn_off()
            self._scheduler.lose_cache(self._clock())
            self._runner.reset()
            return None if step is None or step.touches_kv else step
        return step

    def _dispatch(self, step: Step) -> None:
        self._count(step)
        try:
            pending = self._runner.submit(step.batch)
        except Exception as exc:  # border: whatever the device raises is an answer for these rows
            while self._in_flight:  # dispatched before it, so they may well be good
                self._retire()
            self._step_failed(step, exc)
            return
        self._in_flight.push(step, pending)

    def _retire(self) -> None:
        out = self._in_flight.pop()
        try:
            result = self._in_flight.read(out)
        except Exception as exc:  # border: as above
            self._step_failed(out.step, exc)
        else:
            self.emit(self._scheduler.commit(out.step, result, self._clock()))
        if not self._in_flight:
            self._idle_since_s, self._had_no_work = self._clock(), self.idle

    def _step_failed(self, step: Step, exc: Exception) -> None:
        _log.error("a %s step of %d rows failed", step.kind, len(step.rows), exc_info=exc)
        self._stats.failed_steps += 1
        error = StepFailed("the device step that this request was part of failed; send it again", retry_after_s=1.0)
        error.__cause__ = exc
        self.emit(self._scheduler.fail(step, error, self._clock()))
        if step.touches_kv:
            self._drop_kv_steps()
            self._runner.reset()

    def _drop_kv_steps(self) -> None:
        """Steps that read the lost cache. Waited for, so that nothing of them runs any more."""
        for out in self._in_flight.keep(lambda step: not step.touches_kv):
            try:
                out.pending.result()
            except Exception as exc:  # expected: the cache that it read is gone
                _log.debug("a step after the failed one failed too", exc_info=exc)

    def _count(self, step: Step) -> None:
        stats, bucket = self._stats, step.batch.bucket
        if not self._in_flight:
            self._count_gap()
        stats.steps[bucket.kind] += 1
        stats.rows[bucket.kind] += len(step.rows)
        stats.tokens[bucket.kind] += step.num_tokens
        stats.padding[bucket.kind] += bucket.rows * bucket.tokens - step.num_tokens

    def _count_gap(self) -> None:
        """The device had nothing to do since `_idle_since_s`; from now on it has, or the host is to blame."""
        now_s = self._clock()
        if self._had_no_work:
            self._stats.device_idle_s += now_s - self._idle_since_s
        else:
            self._stats.device_stall_s += now_s - self._idle_since_s
        self._idle_since_s, self._had_no_work = now_s, False

    def _note_end_of_work(self) -> None:
        """Rows also end without a step that is read: cancelled, out of time, complete by their constraint."""
        if not self._had_no_work and self.idle:
            self._count_gap()
            self._had_no_work = True
