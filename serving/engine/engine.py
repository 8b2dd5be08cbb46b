"""The engine: one thread that owns the runner and turns jobs into device steps. The life of a job is written here.

1. `submit`, on the caller's thread, makes a Sequence of each row and refuses at once what can never run (too long for
   the context or the KV cache), what there is no room for (Overloaded), and everything before the engine is ready or
   after it is closed. What it accepts goes to the inbox, all rows of a job or none; the Ticket is the handle to it.
2. The engine thread takes the inbox into the scheduler: rows that only score and are short wait for a SCORE step, all
   others wait until a slot and KV pages for their prompt are free, then run in EXTEND steps, chunk by chunk, and
   generate in DECODE steps, taking pages as they grow. What an earlier prompt left in the prefix cache is not computed
   again. Urgent goes before normal before low, up to the ageing bound, and tenants take turns (`waiting`). Where a slot
   or a page is lacking the youngest row of the lowest priority makes room, and starts again later with its tokens.
3. Each turn (`loop`): `scheduler.next_batch -> runner.submit -> (read the step before it) -> scheduler.commit`. A
   decode step is dispatched before the last one's tokens are read: the device feeds itself through the row's slot. With
   `speculate` and few rows it is a SPECULATE step, which gives a row one token or two (`generation`).
   A row with a constraint waits until its last token is read and the mask of its next one is found (`masks`).
4. `commit` turns a step's output into Updates. The listener gets all of a job's updates of a step in one call, on the
   engine thread: it must not block. Tokens come as they are sampled; prompt log-probabilities with the first token.
5. A row ends exactly once, in an Update with `finish` (STOP: its last token is a stop token, which the caller leaves
   out of the text, or its constraint is fulfilled; LENGTH; SCORED) or `error`: Cancelled (`Ticket.cancel`, effective
   in a turn, pages free at once), DeadlineExceeded (in a queue: without touching the device), StepFailed (its step
   raised, or its logits are not finite: then it alone). After a failed step that could write the KV cache the other
   rows with KV start again, with a fresh cache. If the loop itself breaks, every row is answered and `failure` says
   why.

Stop strings, text and HTTP are not known here: see serving.pipeline.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from serving.batch import Runner
from serving.config import EngineConfig
from serving.errors import BadRequest, Cancelled, DeadlineExceeded, InternalError, NotReady, Overloaded, ServingError
from serving.types import Job, ProfileInfo, Update

from .buckets import BucketSet
from .costs import StepCosts
from .gauges import Gauges
from .inbox import Inbox
from .kv_pool import KvPool
from .loop import Loop
from .masks import Masks
from .ring import Ring
from .scheduler import Events, Scheduler
from .stats import EngineStats
from .ticket import Listener, Ticket
from .tier_setup import make_tiers

_log = logging.getLogger("tidegate.engine")

_WARMUP_RETRY_S = 2.0
_MAX_RETRY_S = 60.0
_MASK_THREADS = 2
_MASK_WAIT_S = 0.001  # what comes meanwhile waits no longer
_JOIN_GRACE_S = 5.0  # beyond the drain time, for the steps that are on the device


class _Closed(Exception):
    """Ends a warm-up that nobody waits for."""


class Engine:
    """`max_context`: tokens that the model may see. `clock`: seconds, the one that deadlines are on.

    `stats` may be given, so that a metrics endpoint can hold it before the engine exists. `fingerprint` says which
    weights and dtype the runner has: profiles on disk are for these alone. `ring`: of a model that sees a window.
    OSError where `profile_dir` cannot be used.
    """

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        *,
        max_context: int,
        clock: Callable[[], float] = time.monotonic,
        stats: EngineStats | None = None,
        fingerprint: str = "",
        ring: Ring | None = None,
    ) -> None:
        self._runner, self._config, self._clock = runner, config, clock
        self._pool = KvPool(runner.num_pages, config.page_size, ring)
        buckets = BucketSet(runner.buckets)
        buckets.check(config, max_context)
        self._costs = costs = StepCosts()
        self._mask_threads = ThreadPoolExecutor(_MASK_THREADS, thread_name_prefix="tidegate-masks")
        self._masks = Masks(self._mask_threads.submit)
        self._disk_thread = ThreadPoolExecutor(1, thread_name_prefix="tidegate-profiles")
        self._tiers = make_tiers(config, runner, costs, fingerprint, self._disk_thread.submit)
        self._scheduler = Scheduler(config, buckets, self._pool, max_context, costs, self._masks, self._tiers)
        self.stats = stats or EngineStats()
        self._loop = Loop(runner, self._scheduler, self._deliver, clock=clock, stats=self.stats, costs=costs)
        self._gauges = Gauges(self.stats, self._scheduler, self._pool)
        self._inbox = Inbox()
        self._open: dict[Ticket, None] = {}  # tickets with rows that have not been answered
        self._progress = (0, len(runner.buckets))
        self._ready_at_s: float | None = None
        self._failure: Exception | None = None
        self._stopped = False
        self._settled = threading.Event()  # the warm-up is over, well or badly
        self._thread: threading.Thread | None = None

    # For callers, any thread

    @property
    def progress(self) -> tuple[int, int]:
        """Buckets compiled, and how many there are."""
        return self._progress

    @property
    def ready(self) -> bool:
        return self._ready_at_s is not None and not self._stopped and self._inbox.close_at_s is None

    @property
    def failure(self) -> Exception | None:
        """Why the engine thread ended by itself."""
        return self._failure

    def start(self) -> None:
        """Warm up and serve, in a thread of its own."""
        assert self._thread is None, "started twice"
        self._thread = threading.Thread(target=self._run, name="tidegate-engine", daemon=True)
        self._thread.start()

    def wait_ready(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of the warm-up; False while it goes on. Then `ready` or `failure` says how it ended."""
        return self._settled.wait(timeout_s)

    def submit(self, job: Job, listener: Listener) -> Ticket:
        """Queue a job. Raises a ServingError where it can never run, or not now."""
        self._refuse_unless_ready()
        if not job.rows:
            raise BadRequest("a job has one row at least")
        if job.deadline_s is not None and job.deadline_s <= self._clock():
            raise DeadlineExceeded("the deadline passed before the request reached the engine")
        ticket = Ticket(job, listener, self._inbox.cancel)
        for before, row in zip((None, *ticket.rows), ticket.rows, strict=False):
            self._scheduler.check(row, before)
        self._inbox.put(ticket, lambda rows, tokens: self._refuse_without_room(ticket, rows, tokens))
        return ticket

    def profiles(self, tenant: str) -> list[ProfileInfo]:
        """The tenant's profiles, the longest unused first."""
        return self._tiers.listed(tenant)

    def delete_profile(self, tenant: str, profile_id: str) -> bool:
        """From host memory and disk; False where the tenant has none of this name."""
        return self._tiers.delete((tenant, profile_id))

    def close(self, timeout_s: float = 0.0) -> None:
        """Accept nothing more, give running rows `timeout_s` to finish, end the rest, and stop the thread."""
        self._inbox.close(self._clock() + timeout_s)
        if self._thread is None:
            self._stop(None)
            return
        self._thread.join(timeout_s + _JOIN_GRACE_S)
        if self._thread.is_alive():
            _log.warning("the engine thread did not stop in time: a step hangs on the device")

    def _refuse_unless_ready(self) -> None:
        if self._failure is not None:
            raise NotReady("the engine has failed; the server must be started again")
        if self._stopped or self._inbox.close_at_s is not None:
            raise NotReady("the server is stopping", retry_after_s=_WARMUP_RETRY_S)
        if self._ready_at_s is None:
            done, total = self._progress
            raise NotReady(f"the model is warming up: {done} of {total} buckets", retry_after_s=_WARMUP_RETRY_S)

    def _refuse_without_room(self, ticket: Ticket, inbox_rows: int, inbox_tokens: int) -> None:
        """Overloaded where the queue is full now, BadRequest where the job is larger than the whole queue."""
        self._refuse_unless_ready()  # once more, under the inbox's lock: what passes here will be answered
        rows, tokens = len(ticket.rows), ticket.num_tokens
        max_rows, max_tokens = self._config.max_queue_rows, self._config.max_queue_tokens
        if rows > max_rows or tokens > max_tokens:
            raise BadRequest(
                f"{rows} rows with {tokens} tokens; {max_rows} rows with {max_tokens} tokens are the most at a time"
            )
        waiting, waiting_tokens = inbox_rows + self._scheduler.num_waiting, self._scheduler.num_waiting_tokens
        waiting_tokens += inbox_tokens
        if waiting + rows > max_rows or waiting_tokens + tokens > max_tokens:
            self.stats.refused_jobs += 1
            raise Overloaded(
                f"{waiting} rows with {waiting_tokens} tokens wait already; {max_rows} and {max_tokens} are the most",
                retry_after_s=self._retry_after_s(waiting),
            )

    def _retry_after_s(self, waiting: int) -> float:
        """How long the rows that wait will take, at the pace since the engine was ready."""
        busy_s = self._clock() - (self._ready_at_s or 0.0) - self.stats.device_idle_s
        pace_s = busy_s / max(1, self.stats.finished_rows)
        return min(_MAX_RETRY_S, max(1.0, waiting * pace_s))

    # The engine thread

    def _run(self) -> None:
        failure: Exception | None = None
        try:
            self._runner.warmup(self._report)
            for bucket, times in self._runner.step_s.items():
                self._costs.learn(bucket, times)
            self._ready_at_s = self._clock()
            self._loop.begin()
            self._gauge()
            self._settled.set()
            while self._take_in():
                self._loop.turn()
                self._gauge()
        except _Closed:
            pass
        except Exception as exc:  # border: the thread never dies without a word
            _log.critical("the engine stopped", exc_info=exc)
            failure = exc
        self._stop(failure)

    def _report(self, done: int, total: int) -> None:
        self._progress = (done, total)
        if self._inbox.close_at_s is not None:
            raise _Closed

    def _take_in(self) -> bool:
        """Wait for something to do and take it in; False when it is time to stop."""
        if self._loop.awaits_masks:
            self._masks.wait(_MASK_WAIT_S)
        elif self._loop.awaits_disk:
            self._tiers.wait()
        cancels = self._inbox.take(self._accept, wait=self._loop.idle)
        for ticket, index in cancels:
            rows = ticket.rows if index is None else ticket.rows[index : index + 1]
            error = Cancelled("the request was cancelled")
            self._loop.emit([event for row in rows for event in self._scheduler.cancel(row, error)])
        close_at_s = self._inbox.close_at_s
        return close_at_s is None or (self._clock() < close_at_s and not self._loop.idle)

    def _accept(self, ticket: Ticket) -> None:
        self._open[ticket] = None
        now_s = self._clock()
        for row in ticket.rows:
            self._scheduler.submit(row, now_s)

    def _deliver(self, events: Events) -> None:
        """One call a ticket."""
        by_ticket: dict[Ticket, list[Update]] = {}
        for row, update in events:
            assert isinstance(row.owner, Ticket)
            by_ticket.setdefault(row.owner, []).append(update)
        for ticket, updates in by_ticket.items():
            try:
                ticket.deliver(updates)
            except Exception:  # border: one caller's fault is not the others'
                _log.exception("the listener of %r raised", ticket)
            if not ticket.unanswered:
                self._open.pop(ticket, None)

    def _gauge(self) -> None:
        self._gauges.read(self._clock() - (self._ready_at_s or 0.0) - self.stats.device_idle_s)
        if self._loop.idle:
            self._gauges.audit()

    def _stop(self, failure: Exception | None) -> None:
        """Answer everyone who still waits, and let the runner go."""
        self._failure, self._stopped = failure, True
        self._settled.set()
        self._inbox.close(self._clock())
        self._inbox.take(self._accept, wait=False)
        if failure is None:
            self._loop.emit(self._scheduler.end_all(NotReady("the server is stopping", retry_after_s=_WARMUP_RETRY_S)))
            self._loop.finish_moves()
        else:
            self._abandon(InternalError("the engine has failed"))
        self._gauge()
        self._disk_thread.shutdown(wait=True)  # profiles on their way are written
        self._mask_threads.shutdown(wait=False, cancel_futures=True)
        self._runner.close()

    def _abandon(self, error: ServingError) -> None:
        """After a fault of our own the scheduler's word counts for nothing: answer by what was never delivered."""
        for ticket in list(self._open):
            for index in sorted(ticket.unanswered):
                self._deliver([(ticket.rows[index], Update(index, error=error))])
