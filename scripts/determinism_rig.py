"""What `check_determinism` drives: engines in this process over one model, and answers down to their bits."""

import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from model.transformer import Transformer
from serving.config import EngineConfig
from serving.engine.engine import Engine
from serving.engine.runner import JaxRunner
from serving.types import Job, Prepared, Priority, SamplingParams, Update

CONTEXT, NEW_TOKENS, LONGEST_PROMPT = 192, 24, 120
SECONDS = 600.0  # an answer that takes longer is lost

# Wide: whole prompts in one step, up to 64 rows. Narrow: other chunks, fewer rows, and pages for a few rows alone.
WIDE = EngineConfig(
    max_slots=64, page_size=16, num_pages=64 * 12 + 1, max_context=CONTEXT, prefill_chunk=128,
    max_score_rows=4, max_score_tokens=CONTEXT, score_batch_tokens=4 * CONTEXT,
)  # fmt: skip
NARROW = EngineConfig(
    max_slots=16, page_size=8, num_pages=81, max_context=CONTEXT, prefill_chunk=24, prefill_batch_tokens=48,
    max_score_rows=1, max_score_tokens=32, prefix_cache=False,
)  # fmt: skip


@dataclass
class Answer:
    """One row's end. `done` is set when the last update is in."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    targets: tuple[float, ...] = ()
    prompt: list[float] = field(default_factory=list)  # log-probabilities from the second prompt token on
    error: Exception | None = None
    started: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)

    def __call__(self, updates: tuple[Update, ...]) -> None:
        for update in updates:
            self.ids += [token.token_id for token in update.tokens]
            self.logprobs += [token.logprob for token in update.tokens]
            self.prompt += [token.logprob for token in update.prompt_logprobs]
            self.targets = update.target_logprobs or self.targets
            self.error = update.error or self.error
            self.started.set()
            if update.finish is not None or update.error is not None:
                self.done.set()

    def wait(self) -> "Answer":
        if not self.done.wait(SECONDS):
            raise TimeoutError("an answer did not come")
        if self.error is not None:
            raise self.error
        return self

    @property
    def bits(self) -> bytes:
        """All log-probabilities, as they lie in memory."""
        numbers = [*self.logprobs, *self.targets, *self.prompt]
        return struct.pack(f"{len(numbers)}f", *numbers)


@contextmanager
def running(model: Transformer, config: EngineConfig, *, deterministic: bool) -> Iterator[Engine]:
    """A warm engine over the model, in one arithmetic or the other; closed at the end."""
    fast = model.arithmetic
    model.arithmetic = fast.fixed() if deterministic else fast
    runner = JaxRunner(model, config, max_context=config.max_context)
    model.arithmetic = fast
    engine = Engine(runner, config, max_context=config.max_context)
    engine.start()
    try:
        if not engine.wait_ready(SECONDS) or engine.failure is not None:
            raise RuntimeError("the engine did not start") from engine.failure
        yield engine
    finally:
        engine.close()


def submit(engine: Engine, row: Prepared, tenant: str, priority: Priority = Priority.NORMAL) -> Answer:
    answer = Answer()
    engine.submit(Job(id=tenant, tenant=tenant, rows=(row,), priority=priority), answer)
    return answer


def one_by_one(engine: Engine, rows: Sequence[Prepared], tenant: str) -> list[Answer]:
    return [submit(engine, row, tenant).wait() for row in rows]


def probes(vocab: int) -> list[Prepared]:
    """Requests of every kind of sampling, and of lengths around a page, a chunk and a tile."""
    rng = np.random.default_rng(1)
    greedy = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, top_logprobs=0)
    drawn = replace(greedy, temperature=1.0)
    samplings = [
        greedy, greedy, replace(drawn, seed=2), replace(drawn, seed=3, top_p=0.9),
        replace(drawn, seed=4, top_k=20, min_p=0.01), replace(greedy, repetition_penalty=1.3),
        replace(drawn, seed=5, frequency_penalty=0.5, logit_bias=((7, 2.0),)),
    ]  # fmt: skip
    lengths = [1, 17, 48, LONGEST_PROMPT, 65, 31, 100]
    rows = [Prepared(_ids(rng, n, vocab), s) for n, s in zip(lengths, samplings, strict=True)]
    read = [Prepared(_ids(rng, 70, vocab), greedy, prompt_logprobs=0)]
    scored = [Prepared(_ids(rng, n, vocab), targets=(3, 5, 8), prompt_logprobs=0) for n in (20, 90)]
    return [*rows, *read, *scored]


def neighbours(vocab: int, count: int, seed: int) -> list[Prepared]:
    """Random requests of all lengths."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        length, new = int(rng.integers(1, LONGEST_PROMPT + 1)), int(rng.integers(4, 49))
        sampling = SamplingParams(max_tokens=new, temperature=float(rng.integers(2)), seed=int(rng.integers(1000)))
        rows.append(Prepared(_ids(rng, length, vocab), sampling))
    return rows


def _ids(rng: np.random.Generator, count: int, vocab: int) -> tuple[int, ...]:
    return tuple(rng.integers(2, vocab, count).tolist())
