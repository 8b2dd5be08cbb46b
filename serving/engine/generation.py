"""Steps of rows that generate: one token a row, or one and a draft.

While few enough rows generate for the SPECULATE buckets, and drafts pay (`payoff`), a step feeds each row's last token
and the device's draft of the next one, so that a row has one token more or two (model/speculate.py); else it is a plain
DECODE step. How many it were is known when the step is read, and the next one is dispatched before that: until then the
row's `planned` and its slot's `position` count both, so its pages hold whatever the device may write, and what was not
accepted is taken back here. A row never has more on the way than its `max_new` asks for.
"""

from serving.batch import Bucket, Kind
from serving.types import Update

from . import outcome
from .buckets import BucketSet
from .costs import StepCosts
from .payoff import Payoff
from .rounds import Rounds
from .running import Running
from .sequence import Sequence
from .step import Step, decode_step, speculate_step

_AHEAD = 2  # the last token and a draft


class Generation:
    """`page_size`: tokens in a KV page."""

    def __init__(self, running: Running, buckets: BucketSet, page_size: int, costs: StepCosts) -> None:
        self._running, self._buckets, self._page_size = running, buckets, page_size
        self._payoff, self._rounds = Payoff(), Rounds(buckets, costs)
        self._max_rows = buckets.max_rows(Kind.SPECULATE)  # 0: this device does not speculate
        self.num_drafted = 0  # drafts that a step checked
        self.num_accepted = 0

    def most(self, num_rows: int) -> int:
        """Tokens that the next step of so many rows feeds each of them at most."""
        return _AHEAD if num_rows <= self._max_rows and not self._payoff.paused else 1

    def owes(self, rows: list[Sequence]) -> bool:
        """Whether some of `rows` have not had their token of a round that others have had theirs of."""
        return bool(self._rounds.owed(rows))

    def bucket(self, rows: list[Sequence], most: int) -> Bucket:
        """For the next step, of all that could have one."""
        return self._plan(rows, most)[2]

    def form(self, every: list[Sequence], most: int) -> Step:
        """The next step, of all that could have one or of some; their pages hold it."""
        slots = self._running.slots
        rows, chunks, bucket = self._plan(every, most)
        self._rounds.taken(rows, every)
        if bucket.kind is Kind.SPECULATE:
            step = speculate_step(bucket, tuple(rows), chunks, slots)
        else:
            step = decode_step(bucket, tuple(rows), slots)
            if len(every) <= self._max_rows:
                self._payoff.skip()
        slots.position[[row.slot for row in rows]] += chunks
        for row, chunk in zip(rows, chunks, strict=True):
            row.planned += chunk
        return step

    def take(self, step: Step, out: outcome.Results, r: int, now_s: float) -> Update:
        """Row r's new tokens."""
        row, places = step.rows[r], out.places(r)
        if step.kind is Kind.SPECULATE:
            self._take_back(row, step.chunks[r] - len(places))
            if out.drafted[r]:
                self.num_drafted += 1
                self.num_accepted += len(places) - 1
                self._payoff.judge(accepted=len(places) > 1)
        start = row.num_asked + row.generated - 1  # where the device had the row's last token
        update = outcome.generated(row, out, r)
        self._running.read(row, start + len(update.tokens), now_s)
        return update

    def _take_back(self, row: Sequence, surplus: int) -> None:
        row.planned -= surplus
        self._running.slots.position[row.slot] -= surplus

    def _plan(self, rows: list[Sequence], most: int) -> tuple[list[Sequence], tuple[int, ...], Bucket]:
        """The rows of the next step, the tokens of each, and where they go."""
        if most == 1:
            rows = self._rounds.next(rows)
        chunks = self._chunks(rows, most)
        return rows, chunks, self._fit(rows, chunks)

    def _chunks(self, rows: list[Sequence], most: int) -> tuple[int, ...]:
        return (1,) * len(rows) if most == 1 else tuple(row.next_chunk(most) for row in rows)

    def _fit(self, rows: list[Sequence], chunks: tuple[int, ...]) -> Bucket:
        """A plain step where nobody has a use for a draft."""
        width = max(chunks)
        end = int((self._running.slots.position[[row.slot for row in rows]] + chunks).max())
        kind = Kind.DECODE if width == 1 else Kind.SPECULATE
        bucket = self._buckets.fit(kind, len(rows), tokens=width, pages=-(-end // self._page_size))
        assert bucket is not None, f"no {kind} bucket holds the running rows"
        return bucket
