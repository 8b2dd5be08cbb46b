"""Fakes for tests of serving: a clock that moves when told, and a NumPy "device" with a deterministic language model.

FakeRunner keeps the tokens of a sequence in its KV pages and reads them back through the page table, so an engine that
mixes up pages, slots or positions gets other tokens than `ToyModel.generate`, which is the reference. Faults: steps
that raise at submit or at result (a KV step that raises loses the cache until `reset`, as donated buffers do), prompts
whose logits are not finite, results held back until `release`. With `speculate_rows` it speculates: the position of a
row and the draft of its next token are the device's, and `draft_rate` of the drafts are right.
"""

import threading
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from serving.batch import NUM_TARGETS, NUM_TOP, PAGES_AT_ONCE, Batch, Bucket, Kind, Progress, StepOutput, StepTimes
from tests.fakes_tables import FakeTables

_HOLD_LIMIT_S = 30.0  # a test that forgets to release fails instead of hanging


class FakeClock:
    """Seconds that move only by `advance`."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


def _mix(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x45D9F3B)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x45D9F3B)
    return x ^ (x >> np.uint32(16))


@dataclass
class ToyModel:
    """The distribution after a context depends on the context's tokens alone.

    `scripts` maps a prompt to what greedy (and any other) sampling answers to it, one token after the other.
    """

    vocab_size: int = 320
    scripts: Mapping[tuple[int, ...], Sequence[int]] = field(default_factory=dict)
    poisoned: frozenset[tuple[int, ...]] = frozenset()  # contexts that start so have NaN logits
    window: tuple[int, int] | None = None  # size and sinks: the rest of a context makes no difference

    def logprobs(self, context: Sequence[int]) -> NDArray[np.float32]:
        """[vocab_size] log-probabilities of the token after `context`."""
        seen = list(context)
        if self.window is not None:
            size, sinks = self.window
            seen = [t if i < sinks or i >= len(context) - size else -1 for i, t in enumerate(context)]
        crc = zlib.crc32(np.asarray(seen, np.int32).tobytes())
        ids = np.arange(self.vocab_size, dtype=np.uint32)
        logits = _mix(ids * np.uint32(2654435761) + np.uint32(crc)).astype(np.float64) / 2**32 * 8.0
        scripted = self._scripted(context)
        if scripted is not None:
            logits[scripted] += 30.0
        logits -= logits.max()
        return (logits - np.log(np.exp(logits).sum())).astype(np.float32)

    def _scripted(self, context: Sequence[int]) -> int | None:
        context = tuple(context)
        for prompt, answer in self.scripts.items():
            done = len(context) - len(prompt)
            if context[: len(prompt)] == prompt and 0 <= done < len(answer):
                return answer[done]
        return None

    def finite(self, context: Sequence[int]) -> bool:
        context = tuple(context)
        return not any(context[: len(p)] == p for p in self.poisoned)

    def sample(
        self,
        context: Sequence[int],
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        seed: int = 0,
        scores: NDArray[np.float64] | None = None,
    ) -> int:
        """Greedy at temperature 0, else Gumbel noise from (seed, position). `scores`: adjusted log-probabilities."""
        scores = self.logprobs(context).astype(np.float64) if scores is None else scores
        if temperature > 0:
            noise = np.random.default_rng([seed & 0xFFFFFFFF, seed >> 32, len(context)]).gumbel(size=self.vocab_size)
            if top_k > 0:
                scores[scores < np.sort(scores)[-top_k]] = -np.inf
            scores = scores / temperature + noise
        return int(scores.argmax())

    def generate(
        self, prompt: Sequence[int], max_tokens: int, stop: Iterable[int] = (), **sampling: float
    ) -> list[int]:
        """The reference: what a right engine answers, the stop token included."""
        context, stops = list(prompt), frozenset(stop)
        while len(context) - len(prompt) < max_tokens:
            context.append(self.sample(context, **sampling))  # type: ignore[arg-type]
            if context[-1] in stops:
                break
        return context[len(prompt) :]


def default_buckets(page_size: int, max_context: int, speculate_rows: int = 0) -> tuple[Bucket, ...]:
    """A few of each kind, up to `max_context` tokens and 64 rows. `speculate_rows` 0: none that speculates."""
    pages = -(-max_context // page_size)
    score = [
        Bucket(Kind.SCORE, r, t, 0)
        for r in (1, 4, 16, 64)
        for t in sorted({t for t in (32, 128) if t < max_context} | {max_context})
    ]
    extend = [Bucket(Kind.EXTEND, r, t, pages) for r, t in ((1, 64), (4, 64), (1, 256))]
    decode = [Bucket(Kind.DECODE, r, 1, p) for r in (1, 4, 16, 64) for p in (max(1, pages // 4), pages)]
    rows = sorted({1, speculate_rows}) if speculate_rows else []
    speculate = [Bucket(Kind.SPECULATE, r, 2, p) for r in rows for p in (max(1, pages // 4), pages)]
    return tuple(score + extend + decode + speculate)


class FakeRunner:
    """Implements serving.batch.Runner. `batches` holds everything that was submitted, in order."""

    def __init__(
        self,
        model: ToyModel | None = None,
        *,
        page_size: int = 16,
        num_pages: int = 2049,
        max_context: int = 512,
        max_slots: int = 64,
        buckets: Sequence[Bucket] | None = None,
        fail_submit: Iterable[int] = (),
        fail_result: Iterable[int] = (),
        held: bool = False,
        speculate_rows: int = 0,
        draft_rate: float = 0.7,
    ) -> None:
        self.model = model or ToyModel()
        self._buckets = tuple(buckets or default_buckets(page_size, max_context, speculate_rows))
        self._draft_rate = draft_rate
        self._page_size, self._num_pages, self._max_slots = page_size, num_pages, max_slots
        self.fail_submit, self.fail_result = set(fail_submit), set(fail_result)
        self.batches: list[Batch] = []
        self.num_resets = self.num_reads = self.num_writes = 0
        self.fail_moves = False
        self.reads_done = True  # whether reads of pages are done before anyone waits for them
        self.closed = False
        self._gate = threading.Semaphore(0) if held else None
        self.reset()
        self.num_resets = 0

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        return self._buckets

    @property
    def num_pages(self) -> int:
        return self._num_pages

    @property
    def page_bytes(self) -> int:
        return self._page_size * 4

    @property
    def step_s(self) -> Mapping[Bucket, StepTimes]:
        return {}

    @property
    def page_copy_s(self) -> float:
        return 0.0

    def read_pages(self, pages: Sequence[int]) -> "FakePages":
        assert 0 < len(pages) <= PAGES_AT_ONCE
        self.num_reads += 1
        if self.fail_moves:
            raise RuntimeError("injected at a read of pages")
        content = self._kv[list(pages)].view(np.uint8)
        return FakePages(None if self._lost else content, self.reads_done)

    def write_pages(self, pages: Sequence[int], content: NDArray[np.uint8]) -> None:
        assert content.shape == (len(pages), self.page_bytes)
        assert len(pages) <= PAGES_AT_ONCE
        self.num_writes += 1
        if self.fail_moves:
            self._lost = True
            raise RuntimeError("injected at a write of pages")
        self._kv[list(pages)] = content.view(np.int32)

    def warmup(self, progress: Progress) -> None:
        for done in range(len(self._buckets) + 1):
            progress(done, len(self._buckets))

    def release(self, num_results: int = 1) -> None:
        """Let that many more results through (with `held`)."""
        assert self._gate is not None
        self._gate.release(num_results)

    def reset(self) -> None:
        self._kv = np.full((self._num_pages, self._page_size), -1, np.int32)
        self._slots = np.full(self._max_slots + 1, -1, np.int32)
        self._positions = np.full(self._max_slots + 1, -1, np.int32)
        self._drafts = np.full(self._max_slots + 1, -1, np.int32)
        self._tables = FakeTables()
        self._lost = False
        self.num_resets += 1

    def close(self) -> None:
        self.closed = True

    def submit(self, batch: Batch) -> "FakePending":
        self._check(batch)
        step = len(self.batches)
        self.batches.append(batch)
        uses_kv = batch.bucket.kind is not Kind.SCORE
        self._tables.write(batch.set_tables, batch.set_masks)
        if step in self.fail_submit:
            self._lost |= uses_kv
            raise RuntimeError(f"injected at submit of step {step}")
        if uses_kv and self._lost:
            return FakePending(None, f"step {step}: buffer has been deleted or donated", self._gate)
        if step in self.fail_result:
            self._lost |= uses_kv
            return FakePending(None, f"injected at result of step {step}", self._gate)
        return FakePending(self._run(batch), None, self._gate)

    def _check(self, batch: Batch) -> None:
        """A shape that was not compiled raises, as in the real runner."""
        b = batch.bucket
        assert b in self._buckets, f"{b} is no compiled bucket"
        assert batch.tokens.shape == (b.rows, b.tokens)
        assert batch.page_table.shape == (b.rows, b.pages)
        assert batch.targets.shape == (b.rows, NUM_TARGETS)
        assert batch.seed.shape == (b.rows, 2)
        for a in (batch.start, batch.length, batch.next_token, batch.slot, batch.temperature, batch.top_k, batch.table):
            assert a.shape == (b.rows,)
        for a in (
            batch.tokens,
            batch.start,
            batch.length,
            batch.next_token,
            batch.page_table,
            batch.slot,
            batch.targets,
        ):
            assert a.dtype == np.int32

    def _run(self, batch: Batch) -> StepOutput:
        b = batch.bucket
        v = min(NUM_TOP, self.model.vocab_size)
        want_prompt = bool(batch.want_prompt)
        speculates = b.kind is Kind.SPECULATE
        rows = 2 * b.rows if speculates else b.rows
        out = StepOutput(
            token=np.full(rows, -5, np.int32),
            logprob=np.full(rows, np.nan, np.float32),
            target_logprobs=np.zeros((rows, NUM_TARGETS), np.float32),
            finite=np.zeros(rows, np.bool_),
            top_ids=np.zeros((rows, v), np.int32) if batch.want_top else None,
            top_logprobs=np.zeros((rows, v), np.float32) if batch.want_top else None,
            prompt_logprobs=np.zeros((b.rows, b.tokens), np.float32) if want_prompt else None,
            prompt_top_ids=np.zeros((b.rows, b.tokens, v), np.int32) if want_prompt else None,
            prompt_top_logprobs=np.zeros((b.rows, b.tokens, v), np.float32) if want_prompt else None,
            drafted=np.zeros(rows, np.bool_) if speculates else None,
            accepted=np.zeros(rows, np.bool_) if speculates else None,
        )
        for r in np.flatnonzero(batch.length > 0).tolist():
            if speculates:
                self._speculate_row(batch, r, out)
            else:
                self._run_row(batch, r, out)
        return out

    def _run_row(self, batch: Batch, r: int, out: StepOutput) -> None:
        context = self._context(batch, r)
        token = self._emit(batch, r, r, context, out)
        if slot := batch.slot[r]:
            self._slots[slot], self._positions[slot], self._drafts[slot] = token, len(context), -1
        if out.prompt_logprobs is not None:
            self._prompt_row(batch, r, context, out)

    def _speculate_row(self, batch: Batch, r: int, out: StepOutput) -> None:
        """As the device does it: both tokens are written, whatever becomes of the second."""
        assert out.drafted is not None
        assert out.accepted is not None
        slot, length = int(batch.slot[r]), int(batch.length[r])
        draft = int(self._drafts[slot])
        context = self._through_pages(batch, r, self._place(batch, r), [int(self._slots[slot]), draft][:length])
        context = context[: len(context) - length + 1]
        token = self._emit(batch, r, r, context, out)
        context.append(token)
        out.drafted[r] = length == 2 and draft >= 0
        out.accepted[r] = out.drafted[r] and draft == token
        if out.accepted[r]:
            token = self._emit(batch, r, batch.bucket.rows + r, context, out)
            context.append(token)
        right = zlib.crc32(np.asarray(context).tobytes()) % 1000 < 1000 * self._draft_rate
        guess = self._sample(batch, r, context, self.model.logprobs(context))
        self._slots[slot], self._positions[slot] = token, len(context) - 1
        self._drafts[slot] = guess if right else (guess + 1) % self.model.vocab_size

    def _emit(self, batch: Batch, r: int, place: int, context: list[int], out: StepOutput) -> int:
        """Sample after `context` for row r, into row `place` of the output."""
        logprobs = self.model.logprobs(context)
        token = self._sample(batch, r, context, logprobs)
        if batch.table[r]:
            self._tables.rows[int(batch.table[r])].generated[token] += 1
        out.token[place], out.logprob[place] = token, logprobs[token]
        out.target_logprobs[place] = logprobs[batch.targets[r]]
        out.finite[place] = self.model.finite(context)
        if out.top_ids is not None and out.top_logprobs is not None:
            out.top_ids[place], out.top_logprobs[place] = _top(logprobs)
        return token

    def _sample(self, batch: Batch, r: int, context: list[int], logprobs: NDArray[np.float32]) -> int:
        return self.model.sample(
            context,
            temperature=float(batch.temperature[r]),
            top_k=int(batch.top_k[r]),
            seed=int(batch.seed[r, 0]) | int(batch.seed[r, 1]) << 32,
            scores=self._adjusted(batch, r, logprobs),
        )

    def _adjusted(self, batch: Batch, r: int, logprobs: NDArray[np.float32]) -> NDArray[np.float64] | None:
        if not batch.table[r]:
            return None
        penalties = (batch.repetition_penalty[r], batch.presence_penalty[r], batch.frequency_penalty[r])
        return self._tables.rows[int(batch.table[r])].adjusted(logprobs, *map(float, penalties))

    def _prompt_row(self, batch: Batch, r: int, context: list[int], out: StepOutput) -> None:
        assert out.prompt_logprobs is not None
        assert out.prompt_top_ids is not None
        assert out.prompt_top_logprobs is not None
        start, length = int(batch.start[r]), int(batch.length[r])
        following = [*context[start + 1 :], int(batch.next_token[r])]
        for i in range(length):
            logprobs = self.model.logprobs(context[: start + i + 1])
            out.prompt_logprobs[r, i] = logprobs[following[i]]
            out.prompt_top_ids[r, i], out.prompt_top_logprobs[r, i] = _top(logprobs)

    def _context(self, batch: Batch, r: int) -> list[int]:
        """The row's tokens from position 0, as the device would see them: through the pages, except in score."""
        start, length = int(batch.start[r]), int(batch.length[r])
        new = [int(t) for t in batch.tokens[r, :length]]
        if batch.bucket.kind is Kind.SCORE:
            assert start == 0
            return new
        if batch.bucket.kind is Kind.DECODE:
            assert length == 1
            start, new = self._place(batch, r), [int(self._slots[batch.slot[r]])]
        return self._through_pages(batch, r, start, new)

    def _place(self, batch: Batch, r: int) -> int:
        """Where the row's last token is: the host knows it where no draft is on the way, else a bound."""
        place, bound = int(self._positions[batch.slot[r]]), int(batch.start[r])
        may_lag = any(bucket.kind is Kind.SPECULATE for bucket in self._buckets)
        assert 0 <= place <= bound if may_lag else place == bound
        return place

    def _through_pages(self, batch: Batch, r: int, start: int, new: list[int]) -> list[int]:
        """The row's tokens from position 0, once `new` ones are written from `start` on."""
        for i, token in enumerate(new):
            page, offset = divmod(start + i, self._page_size)
            assert batch.page_table[r, page] != 0, "a valid token must not go to page 0"
            self._kv[batch.page_table[r, page], offset] = token
        num = start + len(new)
        pages = batch.page_table[r, : -(-num // self._page_size)]
        return [int(t) for t in self._kv[pages].reshape(-1)[:num]]


def _top(logprobs: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    ids = np.argsort(-logprobs, kind="stable")[:NUM_TOP]
    return ids, logprobs[ids]


@dataclass(frozen=True)
class FakePages:
    content: NDArray[np.uint8] | None
    early: bool

    def done(self) -> bool:
        return self.early

    def result(self) -> NDArray[np.uint8]:
        if self.content is None:
            raise RuntimeError("a read of pages: buffer has been deleted or donated")
        return self.content


@dataclass(frozen=True)
class FakePending:
    output: StepOutput | None
    fault: str | None
    gate: threading.Semaphore | None

    def done(self) -> bool:
        return self.gate is None

    def result(self) -> StepOutput:
        if self.gate is not None and not self.gate.acquire(timeout=_HOLD_LIMIT_S):
            raise TimeoutError("the test never released this result")
        if self.output is None:
            raise RuntimeError(self.fault)
        return self.output
