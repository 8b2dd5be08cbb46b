"""A served model that sees a window: the compiled steps over pages that come round, against its own full forward."""

from collections.abc import Iterator

import pytest

from model.architecture import Window
from model.transformer import Transformer
from serving.batch import Bucket, Kind
from serving.config import EngineConfig
from serving.engine.ring import Ring
from serving.engine.runner import JaxRunner
from serving.types import Prepared, SamplingParams
from tests.fakes_model import Driven, Logprobs, tiny_model

CONFIG = EngineConfig(max_slots=4, page_size=4, num_pages=40, prefill_chunk=8, max_context=64, hard_size=4, soft_size=2)
WINDOW = Window(8, 3)
RING = Ring.of(WINDOW.size, WINDOW.sinks, CONFIG.page_size, CONFIG.prefill_chunk)

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture(scope="module")
def model() -> Transformer:
    model = tiny_model(3)
    model.narrow(WINDOW)
    return model


@pytest.fixture(scope="module")
def runner(model: Transformer, quick_compile: None) -> Iterator[JaxRunner]:
    buckets = [Bucket(Kind.EXTEND, 2, 8, 16), Bucket(Kind.DECODE, 4, 1, 16)]
    runner = JaxRunner(model, CONFIG, max_context=64, buckets=buckets, ring=RING)
    runner.warmup(lambda done, total: None)
    yield runner
    runner.close()


def test_rows_of_any_length_are_what_the_full_forward_says_in_a_ring_of_pages(
    model: Transformer, runner: JaxRunner
) -> None:
    driven, logprobs = Driven(runner, CONFIG, RING), Logprobs(model)
    asked = [(tuple(range(2 + n, 2 + 2 * n)), new) for n, new in ((3, 20), (22, 12), (40, 20), (41, 1), (55, 9))]
    got = driven.run(*(Prepared(p, sampling=SamplingParams(max_tokens=n, temperature=0.0)) for p, n in asked))
    for updates, (prompt, new) in zip(got, asked, strict=True):
        context, tokens = list(prompt), [t for u in updates for t in u.tokens]
        assert len(tokens) == new
        for token in tokens:
            expected = logprobs(context)[-1]
            assert expected[token.token_id] >= expected.max() - 1e-5
            assert token.logprob == pytest.approx(float(expected[token.token_id]), abs=1e-4)
            context.append(token.token_id)
    assert driven.pool.used == 0
    assert driven.pool.high_water <= CONFIG.max_slots * RING.size


def test_what_fell_out_of_the_window_is_not_seen(runner: JaxRunner) -> None:
    """Two layers see 2 x 7 positions back, and the sinks; a token in between is as good as any other."""
    driven = Driven(runner, CONFIG, RING)
    prompts = [tuple(10 + i if i == changed else 5 for i in range(40)) for changed in (1, 10, 20, 30)]
    sampling = SamplingParams(max_tokens=1, temperature=0.0, top_logprobs=3)
    sink, far, also_far, near = (
        u[-1].tokens[0] for u in driven.run(*(Prepared(p, sampling=sampling) for p in prompts))
    )
    assert far.logprob == also_far.logprob
    assert sink.logprob != far.logprob != near.logprob
