"""Case A35: long answers among others are those of each alone, with pages reused, rows stopped, prompts cached.

Here 200 tokens of a tiny model; `python -m scripts.check_long_answers` does it with 32 streams of 4,096.
"""

from collections.abc import Iterator

import numpy as np
import pytest

from serving.batch import Bucket, Kind
from serving.config import EngineConfig
from serving.engine.runner import JaxRunner
from serving.engine.sequence import Sequence, make_sequences
from serving.errors import Cancelled
from serving.types import Job, Prepared, SamplingParams
from tests.fakes_model import Driven, tiny_model

CONTEXT, NEW = 256, 200
PAGES_A_ROW = CONTEXT // 8
CONFIG = EngineConfig(
    max_slots=4, page_size=8, num_pages=2 * PAGES_A_ROW + 1, max_context=CONTEXT, prefill_chunk=16, hard_size=4,
    soft_size=2,
)  # fmt: skip
BUCKETS = [Bucket(Kind.EXTEND, 1, 16, PAGES_A_ROW), Bucket(Kind.DECODE, 4, 1, PAGES_A_ROW)]
PROMPTS = [tuple(np.random.default_rng(i).integers(2, 320, 20 + 5 * i).tolist()) for i in range(4)]


@pytest.fixture(scope="module")
def runner(quick_compile: None) -> Iterator[JaxRunner]:
    model = tiny_model(3)
    model.arithmetic = model.arithmetic.fixed()
    runner = JaxRunner(model, CONFIG, max_context=CONTEXT, buckets=BUCKETS)
    runner.warmup(lambda done, total: None)
    yield runner
    runner.close()


def answer(driven: Driven, row: Sequence) -> list[tuple[int, float]]:
    return [(t.token_id, t.logprob) for update in driven.updates[row] for t in update.tokens]


def submitted(driven: Driven, prompt: tuple[int, ...]) -> Sequence:
    row = Prepared(prompt, sampling=SamplingParams(max_tokens=NEW, temperature=0.0))
    (sequence,) = make_sequences(driven, Job("job", "t", (row,)))
    driven.scheduler.check(sequence)
    driven.scheduler.submit(sequence, driven.clock())
    return sequence


def test_a35_a_long_answer_among_others_is_what_it_is_alone(runner: JaxRunner) -> None:
    driven = Driven(runner, CONFIG, context=CONTEXT)
    alone = []
    for prompt in PROMPTS:
        row = submitted(driven, prompt)
        driven.finish()
        alone.append(answer(driven, row))
    assert all(len(tokens) == NEW for tokens in alone)
    among, leaving = [], []
    for prompt in PROMPTS:  # the first half of each is in the cache by now, or was evicted
        leaving.append(submitted(driven, prompt[:-1]))
        among.append(submitted(driven, prompt))
        for _ in range(25):
            driven.loop.turn()
        driven.loop.emit(driven.scheduler.cancel(leaving[-1], Cancelled("left")))
    driven.finish()
    assert [answer(driven, row) for row in among] == alone
    assert driven.scheduler.num_preempted > 0
    assert driven.scheduler.num_cached_tokens > 0
    assert driven.pool.used == 0
