"""Which rows go to the device next, and what became of them: all of the engine's policy, none of its waiting.

Rows that only score and fit a score bucket wait in `_scores`; all others come and go through `_room`. Each call of
`next_batch` takes the kind of step that was served longest ago among those that are ready, so scoring, prompts and
generation, which goes by rounds (`rounds`), take turns and none waits for more than two of the others; a prompt beside
running streams goes in chunks that keep their token gap (`prefill`, `token_gap`). Every row ends exactly once, through
`_end`.
"""

from serving.batch import Kind, StepOutput
from serving.config import EngineConfig
from serving.errors import DeadlineExceeded, ServingError, StepFailed
from serving.types import Update

from . import outcome
from .buckets import BucketSet
from .costs import StepCosts
from .deadlines import Deadlines
from .former import BatchFormer
from .generation import Generation
from .kv_pool import KvPool
from .kv_tiers import KvTiers
from .limits import RowLimits
from .lru_k import LruK
from .masks import Masks
from .packing import pack_score
from .page_keys import chain
from .prefill import Prefill
from .prefix_cache import PrefixCache
from .room import Room
from .running import Running
from .sequence import Sequence, Stage
from .slots import Slots
from .step import Step, score_step
from .waiting import WaitingRows

Events = list[tuple[Sequence, Update]]

_LRU_HISTORY = 4  # evicted pages whose uses are remembered, as a multiple of the pages


class Scheduler:
    """Not thread-safe: the engine thread owns it. Times are seconds on the engine's clock."""

    def __init__(
        self,
        config: EngineConfig,
        buckets: BucketSet,
        pool: KvPool,
        max_context: int,
        costs: StepCosts | None = None,
        masks: Masks | None = None,
        tiers: KvTiers | None = None,
    ) -> None:
        """`masks`: where constraints are pushed; None: at once, on this thread. `tiers` None: what the device keeps."""
        self._config, self._buckets, self._pool = config, buckets, pool
        self._masks = masks or Masks(lambda work: work())
        self._scores = WaitingRows(config.ageing_s)
        self._scoring: dict[Sequence, None] = {}  # dispatched, not read yet
        lru: LruK[bytes] = LruK(correlated_s=config.lru_window_s, max_history=_LRU_HISTORY * pool.total)
        self.tiers = tiers or KvTiers.off()
        self.cache = PrefixCache(pool, lru, enabled=config.prefix_cache, evicted=self.tiers.evicted)
        self._running = Running(Slots(config.max_slots, buckets.max_pages(), pool.ring), pool, self.cache, self.tiers)
        self._room = Room(self._running, config.ageing_s)
        costs = costs or StepCosts()
        self.generation = Generation(self._running, buckets, pool.page_size, costs)
        self._prefill = Prefill(config, self._running, buckets, pool.page_size, costs)
        self._score_former = BatchFormer(config)
        self._limits = RowLimits(pool, max_context, buckets.max_tokens(Kind.SCORE))
        self._deadlines = Deadlines()
        self._num_arrived = 0
        self._served = dict.fromkeys(Kind, 0)  # the number of the step in which each kind was served last
        self._num_steps = 0

    # What waits and runs

    @property
    def num_waiting(self) -> int:
        return len(self._scores) + len(self._room.waiting)

    @property
    def num_waiting_tokens(self) -> int:
        return self._scores.num_tokens + self._room.waiting.num_tokens

    @property
    def num_masks_out(self) -> int:
        """Rows that wait for their next mask, those that have ended meanwhile among them."""
        return self._masks.num_out

    @property
    def running(self) -> Running:
        return self._running

    @property
    def num_running(self) -> int:
        return len(self._scoring) + len(self._running)

    @property
    def num_preempted(self) -> int:
        """Rows stopped to make room, ever."""
        return self._room.num_preempted

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache saved, ever."""
        return self._room.num_cached_tokens

    # A row comes, and leaves early

    def check(self, row: Sequence, before: Sequence | None = None) -> None:
        """ContextLengthExceeded where the row could never run, with the numbers. Any thread may call it. `before`: a
        row of its job that passed."""
        self.tiers.check(row)
        self._limits.check(row)
        row.turns = self._limits.turns(row)
        if (
            self.cache.enabled and not row.turns and not self._limits.is_score(row)
        ):  # hashed here, on the caller's thread
            same = before is not None and before.prompt is row.prompt and before.keys
            row.keys = same.copy() if same else chain(row.tenant, row.prompt, self._pool.page_size)

    def submit(self, row: Sequence, now_s: float) -> None:
        """Queue a row that passed `check`."""
        row.arrived_s, row.queued_s, row.order = now_s, now_s, self._num_arrived
        self._num_arrived += 1
        row.rank = (now_s + row.priority * self._config.ageing_s, row.order)
        if self._limits.is_score(row):
            self._scores.push(row)
        else:
            self._room.waiting.push(row)
            self._running.arrive(row)
        self._deadlines.push(row)

    def cancel(self, row: Sequence, error: ServingError) -> Events:
        """End the row now, wherever it is; nothing if it has ended. Its pages are free at once: the device runs steps
        in order, so whoever gets them next writes after the last step that this row is part of."""
        return [] if row.stage is Stage.DONE else [self._end(row, Update(row.row, error=error))]

    def expire(self, now_s: float) -> Events:
        """End every row whose deadline has come."""
        message = "the deadline passed before the answer was complete"
        return [e for row in self._deadlines.expired(now_s) for e in self.cancel(row, DeadlineExceeded(message))]

    def take_masks(self) -> Events:
        """Rows whose mask has been found can go on; those whose text is complete by it end."""
        return [self._end(row, update) for row, update in self._masks.collect() if row.stage is not Stage.DONE]

    # Steps

    def next_batch(self, now_s: float, *, device_idle: bool) -> Step | None:
        """The next step, None where nothing is ready. `device_idle`: no step is on the device."""
        self._room.admit(now_s)
        decodable = self._running.decodable()
        most = self.generation.most(len(decodable))
        decodable = self._room.with_pages(decodable, most, now_s)
        ready = [Kind.DECODE] if decodable else []
        if self._prefill.ready(now_s, self._num_arrived, idle=device_idle and not ready, beside=bool(ready)):
            ready.append(Kind.EXTEND)
        if self._score_ready(now_s, device_idle and not ready):
            ready.append(Kind.SCORE)
        if not ready:
            return None
        amid_round = self.generation.owes(decodable)
        kind = Kind.DECODE if amid_round else min(ready, key=self._served.__getitem__)
        self._num_steps += 1
        self._served[kind] = self._num_steps
        if kind is Kind.SCORE:
            return self._form_score()
        if kind is Kind.DECODE:
            step = self.generation.form(decodable, most)
            if not amid_round:
                self._prefill.decoded(step.batch.bucket, len(decodable))
            return step
        beside = self.generation.bucket(decodable, most) if decodable else None
        return self._prefill.form(beside, len(decodable))

    def commit(self, step: Step, out: StepOutput, now_s: float) -> Events:
        """Take the results in; rows that have ended or been stopped meanwhile are passed over."""
        results = outcome.Results(out, step.batch.bucket)
        events: Events = []
        take = {Kind.SCORE: _take_score, Kind.EXTEND: self._take_chunk}.get(step.kind, self.generation.take)
        for r, row in enumerate(step.rows):
            if row.stage is Stage.DONE or row.run != step.runs[r]:
                continue
            update = take(step, results, r, now_s) if results.finite[r] else _not_finite(row)
            if update is None:
                continue
            final = update.finish is not None or update.error is not None
            if update.tokens and row.constraint is not None and not final:
                self._masks.start(row, update.tokens[-1].token_id)
            events.append(self._end(row, update) if final else (row, update))
        return events

    def fail(self, step: Step, error: ServingError, now_s: float) -> Events:
        """The step raised: end its rows. Where it could write the KV cache all of it is lost, and every other row that
        has something there starts again with what it has generated."""
        events = [e for r, row in enumerate(step.rows) if row.run == step.runs[r] for e in self.cancel(row, error)]
        if step.touches_kv:
            self.lose_cache(now_s)
        return events

    def lose_cache(self, now_s: float) -> None:
        """The device's KV pages are gone: rows that have something there start again with what they have generated."""
        for row in [row for row in self._running if row.prefilled > 0]:
            self._room.put_back(row, now_s)
        self._running.lose_cache()

    def end_all(self, error: ServingError) -> Events:
        """End every row that waits or runs."""
        rows = [*self._scoring, *self._running, *self._scores.rows(), *self._room.waiting.rows()]
        return [e for row in rows for e in self.cancel(row, error)]

    # Scoring: one step a row

    def _score_ready(self, now_s: float, idle: bool) -> bool:
        oldest = self._scores.oldest()
        return oldest is not None and self._score_former.ready(
            rows=len(self._scores),
            tokens=self._scores.num_tokens,
            urgent=self._scores.has_urgent(),
            waited_s=now_s - oldest.arrived_s,
            idle=idle,
            oldest=oldest.order,
            arrived=self._num_arrived,
        )

    def _form_score(self) -> Step:
        packing = pack_score(self._scores, self._buckets, self._config.step_tokens)
        for row in packing.rows:
            row.stage = Stage.SCORING
            self._scoring[row] = None
        return score_step(packing.bucket, packing.rows)

    # Results

    def _take_chunk(self, step: Step, out: outcome.Results, r: int, now_s: float) -> Update | None:
        """The row's news; None for a chunk that is not its prompt's last."""
        row, start, length = step.rows[r], step.starts[r], step.chunks[r]
        self._running.read(row, start + length, now_s)
        outcome.keep_prompt(row, out.arrays, r, start, length)
        if start + length < row.num_prompt:
            return None
        return outcome.scored(row, out, r) if row.max_new == 0 else outcome.generated(row, out, r)

    def _end(self, row: Sequence, update: Update) -> tuple[Sequence, Update]:
        """The only way out: whatever the row holds goes back."""
        assert row.stage is not Stage.DONE, "a row ends once"
        if row.stage is Stage.WAITING:
            self._scores.discard(row) or self._room.waiting.discard(row)
        elif row.stage is Stage.SCORING:
            del self._scoring[row]
        else:
            self._running.stop(row)
        row.stage = Stage.DONE
        return row, update


def _take_score(step: Step, out: outcome.Results, r: int, now_s: float) -> Update | None:
    row = step.rows[r]
    outcome.keep_prompt(row, out.arrays, r, 0, row.num_prompt)
    return outcome.scored(row, out, r)


def _not_finite(row: Sequence) -> Update:
    return Update(row.row, error=StepFailed("the model's output for this row is not finite"))
