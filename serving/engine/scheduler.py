"""Which rows go to the device next, and what became of them: all of the engine's policy, none of its waiting.

Rows that only score and fit a score bucket wait in `_scores`; all others wait in `_prompts` until a slot and all the
pages that they could ever need are free, so a row that runs can always finish and no deadlock exists. Each call of
`next_batch` takes the kind of step that was served longest ago among those that are ready, so scoring, prompts and
generation take turns and none waits for more than two steps of the others. Within a kind the order is that of
`WaitingRows`. Every row ends exactly once, through `_end`.
"""

from bisect import insort

from serving.batch import Kind, StepOutput
from serving.config import EngineConfig
from serving.errors import ContextLengthExceeded, DeadlineExceeded, ServingError, StepFailed
from serving.types import Update

from . import outcome
from .buckets import BucketSet
from .deadlines import Deadlines
from .kv_pool import KvPool
from .packing import pack_extend, pack_score
from .sequence import Sequence, Stage
from .slots import Slots
from .step import Step, decode_step, extend_step, score_step
from .waiting import WaitingRows

Events = list[tuple[Sequence, Update]]


class Scheduler:
    """Not thread-safe: the engine thread owns it. Times are seconds on the engine's clock."""

    def __init__(self, config: EngineConfig, buckets: BucketSet, pool: KvPool, max_context: int) -> None:
        self._config, self._buckets, self._pool, self._max_context = config, buckets, pool, max_context
        self._scores = WaitingRows(config.ageing_s)
        self._prompts = WaitingRows(config.ageing_s)
        self._scoring: dict[Sequence, None] = {}  # dispatched, not read yet
        self._prefill: list[Sequence] = []  # by rank
        self._decode: dict[Sequence, None] = {}  # by the time of their first token
        self._max_score_tokens = buckets.max_tokens(Kind.SCORE)
        self._slots = Slots(config.max_slots, buckets.max_pages())
        self._deadlines = Deadlines()
        self._served = dict.fromkeys(Kind, 0)  # the number of the step in which each kind was served last
        self._num_steps = 0

    # What waits and runs

    @property
    def num_waiting(self) -> int:
        return len(self._scores) + len(self._prompts)

    @property
    def num_waiting_tokens(self) -> int:
        return self._scores.num_tokens + self._prompts.num_tokens

    @property
    def num_running(self) -> int:
        return len(self._scoring) + len(self._prefill) + len(self._decode)

    # A row comes, and leaves early

    def check(self, row: Sequence) -> None:
        """ContextLengthExceeded where the row could never run, with the numbers. Any thread may call it."""
        asked = row.num_prompt + row.max_new
        if asked > self._max_context:
            raise ContextLengthExceeded(
                f"the prompt has {row.num_prompt} tokens and {row.max_new} are asked for: {asked} together, "
                f"the context is {self._max_context}; shorten the prompt or lower max_tokens"
            )
        if self._is_score(row):
            return
        need = self._pool.pages_for(row.num_kv)
        if need > self._pool.total:
            raise ContextLengthExceeded(
                f"{asked} tokens need {need} KV pages of {self._pool.page_size}; the cache has {self._pool.total}"
            )

    def submit(self, row: Sequence, now_s: float) -> None:
        """Queue a row that passed `check`."""
        row.arrived_s = now_s
        (self._scores if self._is_score(row) else self._prompts).push(row)
        self._deadlines.push(row)

    def cancel(self, row: Sequence, error: ServingError) -> Events:
        """End the row now, wherever it is; nothing if it has ended. Its pages are free at once: the device runs steps
        in order, so whoever gets them next writes after the last step that this row is part of."""
        return [] if row.stage is Stage.DONE else [self._end(row, Update(row.row, error=error))]

    def expire(self, now_s: float) -> Events:
        """End every row whose deadline has come."""
        message = "the deadline passed before the answer was complete"
        return [e for row in self._deadlines.expired(now_s) for e in self.cancel(row, DeadlineExceeded(message))]

    # Steps

    def next_batch(self, now_s: float, *, device_idle: bool) -> Step | None:
        """The next step, None where nothing is ready. `device_idle`: no step is on the device."""
        self._admit()
        ready = [kind for kind, rows in ((Kind.EXTEND, self._prefill), (Kind.DECODE, self._decodable())) if rows]
        if self._score_ready(now_s, device_idle and not ready):
            ready.append(Kind.SCORE)
        if not ready:
            return None
        kind = min(ready, key=self._served.__getitem__)
        self._num_steps += 1
        self._served[kind] = self._num_steps
        return {Kind.SCORE: self._form_score, Kind.EXTEND: self._form_extend, Kind.DECODE: self._form_decode}[kind]()

    def commit(self, step: Step, out: StepOutput) -> Events:
        """Take the results in; rows that have ended meanwhile are passed over."""
        results = outcome.Results(out)
        events: Events = []
        for r, row in enumerate(step.rows):
            if row.stage is Stage.DONE:
                continue
            update = self._take(step, results, r) if results.finite[r] else _not_finite(row)
            if update is None:
                continue
            final = update.finish is not None or update.error is not None
            events.append(self._end(row, update) if final else (row, update))
        return events

    def fail(self, step: Step, error: ServingError) -> Events:
        """The step raised: end its rows, and where it could write the KV cache all that have something there."""
        rows = list(step.rows)
        if step.touches_kv:
            rows += [row for row in self._prefill if row.prefilled > 0] + list(self._decode)
        return [e for row in rows for e in self.cancel(row, error)]

    def end_all(self, error: ServingError) -> Events:
        """End every row that waits or runs."""
        rows = [*self._scoring, *self._prefill, *self._decode, *self._scores.rows(), *self._prompts.rows()]
        return [e for row in rows for e in self.cancel(row, error)]

    # Scoring: one step a row

    def _is_score(self, row: Sequence) -> bool:
        return row.max_new == 0 and row.num_prompt <= self._max_score_tokens

    def _score_ready(self, now_s: float, nothing_else: bool) -> bool:
        """Enough rows, or fewer with an urgent one, or one that has waited long, or a device without other work."""
        count, oldest = len(self._scores), self._scores.oldest_s()
        if oldest is None:
            return False
        return (
            nothing_else
            or count >= self._config.hard_size
            or (count >= self._config.soft_size and self._scores.has_urgent())
            or now_s - oldest >= self._config.max_wait_ms / 1000
        )

    def _form_score(self) -> Step:
        packing = pack_score(self._scores, self._buckets, self._config.step_tokens)
        for row in packing.rows:
            row.stage = Stage.SCORING
            self._scoring[row] = None
        return score_step(packing.bucket, packing.rows)

    # Prompts: pages for all that the row could need, then chunk by chunk

    def _admit(self) -> None:
        while (row := self._prompts.head()) is not None and self._slots.free:
            need = self._pool.pages_for(row.num_kv)
            if need > self._pool.free:
                return  # nobody overtakes: a long row would wait for ever behind short ones
            self._prompts.pop()
            row.slot = self._slots.assign(row, self._pool.take(row, need))
            row.stage = Stage.PREFILL
            insort(self._prefill, row, key=self._prompts.rank)

    def _form_extend(self) -> Step:
        packing = pack_extend(
            self._prefill,
            self._buckets,
            max_chunk=self._config.prefill_chunk,
            page_size=self._pool.page_size,
            step_tokens=self._config.step_tokens,
        )
        step = extend_step(packing.bucket, packing.rows, packing.chunks, self._slots)
        for row, chunk in zip(packing.rows, packing.chunks, strict=True):
            row.prefilled += chunk
            if row.prefilled == row.num_prompt:
                self._prefill.remove(row)
                self._decode[row] = None
                row.stage, row.planned = Stage.DECODE, min(1, row.max_new)
        return step

    # Generation: one token a row and step

    def _decodable(self) -> list[Sequence]:
        return [row for row in self._decode if row.planned < row.max_new]

    def _form_decode(self) -> Step:
        rows = tuple(self._decodable()[: self._buckets.max_rows(Kind.DECODE)])
        slots = [row.slot for row in rows]
        pages = self._pool.pages_for(int(self._slots.position[slots].max()) + 1)
        bucket = self._buckets.fit(Kind.DECODE, len(rows), pages=pages)
        assert bucket is not None, "no decode bucket holds the running rows"
        step = decode_step(bucket, rows, self._slots)
        self._slots.position[slots] += 1
        for row in rows:
            row.planned += 1
        return step

    # Results

    def _take(self, step: Step, out: outcome.Results, r: int) -> Update | None:
        """The row's news; None for a chunk that is not its prompt's last."""
        row = step.rows[r]
        if step.kind is not Kind.DECODE:
            start, length = step.starts[r], step.chunks[r]
            outcome.keep_prompt(row, out.arrays, r, start, length)
            if start + length < row.num_prompt:
                return None
        return outcome.scored(row, out, r) if row.max_new == 0 else outcome.generated(row, out, r)

    def _end(self, row: Sequence, update: Update) -> tuple[Sequence, Update]:
        """The only way out: whatever the row holds goes back."""
        assert row.stage is not Stage.DONE, "a row ends once"
        if row.stage is Stage.WAITING:
            self._scores.discard(row) or self._prompts.discard(row)
        elif row.stage is Stage.SCORING:
            del self._scoring[row]
        else:
            self._give_back(row)
        row.stage = Stage.DONE
        return row, update

    def _give_back(self, row: Sequence) -> None:
        if row.stage is Stage.PREFILL:
            self._prefill.remove(row)
        else:
            del self._decode[row]
        self._pool.release(row)
        self._slots.release(row.slot)
        row.slot = 0


def _not_finite(row: Sequence) -> Update:
    return Update(row.row, error=StepFailed("the model's output for this row is not finite"))
