"""Rows that generate with drafts: the tokens of plain decoding, in fewer steps, whatever happens on the way."""

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import pytest
from msgspec.structs import replace as changed

from model.transformer import Transformer
from serving.batch import Bucket, Kind
from serving.config import EngineConfig
from serving.engine.runner import JaxRunner
from serving.errors import StepFailed
from serving.types import Finish, Prepared, SamplingParams, TokenLogprob
from tests.fakes import ToyModel
from tests.fakes_constraint import Slotted
from tests.fakes_engine import SMALL, TurnedEngine, generate_row
from tests.fakes_model import Driven, tiny_model


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(int(t) for t in np.random.default_rng(seed).integers(2, 320, length))


def kinds(engine: TurnedEngine) -> list[Kind]:
    return [batch.bucket.kind for batch in engine.runner.batches]


@pytest.mark.parametrize("draft_rate", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_are_those_of_plain_decoding(draft_rate: float, page_size: int, temperature: float) -> None:
    config = changed(SMALL, page_size=page_size)
    engine = TurnedEngine(config, num_pages=257, speculate_rows=4, draft_rate=draft_rate)
    asked = [(prompt(n, n), new) for n, new in ((1, 9), (4, 17), (7, 1), (15, 2), (16, 30), (40, 24))]
    rows = engine.submit(*(generate_row(p, new, temperature=temperature, seed=3) for p, new in asked))
    engine.run()
    for row, (p, new) in zip(rows, asked, strict=True):
        assert engine.tokens(row) == engine.model.generate(p, new, temperature=temperature, seed=3)
        assert engine.last(row).finish is Finish.LENGTH
    generation = engine.scheduler.generation
    rate = generation.num_accepted / generation.num_drafted
    assert rate == draft_rate if draft_rate in (0.0, 1.0) else 0.2 < rate < 0.8


def test_right_drafts_halve_the_steps() -> None:
    engine = TurnedEngine(speculate_rows=1, draft_rate=1.0)
    (row,) = engine.submit(generate_row(prompt(5), 41))
    engine.run()
    assert len(engine.tokens(row)) == 41
    assert kinds(engine).count(Kind.SPECULATE) <= 22  # the first one has no draft
    assert max(len(update.tokens) for update in engine.updates[row]) == 2
    assert engine.stats.generated_tokens == 41


def test_more_rows_than_speculation_is_for_decode_plainly_and_go_back_to_it() -> None:
    engine = TurnedEngine(speculate_rows=2, draft_rate=1.0)
    asked = [(prompt(5, i), new) for i, new in enumerate((40, 40, 12, 12))]
    rows = engine.submit(*(generate_row(p, new) for p, new in asked))
    engine.run()
    assert [engine.tokens(row) for row in rows] == [engine.model.generate(p, new) for p, new in asked]
    for batch in engine.runner.batches:
        generating = int((batch.length > 0).sum())
        assert batch.bucket.kind is not Kind.SPECULATE or generating <= 2
        assert batch.bucket.kind is not Kind.DECODE or generating > 2 or batch.length.max() == 1
    assert {Kind.DECODE, Kind.SPECULATE} <= set(kinds(engine))
    first = kinds(engine).index(Kind.SPECULATE)
    assert kinds(engine).index(Kind.DECODE) < first
    assert kinds(engine)[first:].count(Kind.DECODE) <= 2  # a last token that needs no draft


def test_a_device_that_does_not_speculate_gets_no_such_step() -> None:
    engine = TurnedEngine()
    engine.submit(generate_row(prompt(5), 9))
    engine.run()
    assert Kind.SPECULATE not in kinds(engine)
    assert engine.scheduler.generation.num_drafted == 0


@pytest.mark.parametrize("place", range(1, 8))
def test_nothing_comes_after_a_stop_token(place: int) -> None:
    engine = TurnedEngine(speculate_rows=4, draft_rate=1.0)
    expected = engine.model.generate(prompt(6), 20)
    stop = expected[place]
    (row,) = engine.submit(generate_row(prompt(6), 20, stop_token_ids=(stop,)))
    engine.run()
    assert engine.tokens(row) == expected[: expected.index(stop) + 1]
    assert engine.last(row).finish is Finish.STOP
    assert engine.pool.used == 0


def test_rows_that_make_room_come_back_with_their_tokens() -> None:
    engine = TurnedEngine(num_pages=16, speculate_rows=4, draft_rate=0.7)
    asked = [(prompt(8, i), 24) for i in range(4)]
    rows = engine.submit(*(generate_row(p, new) for p, new in asked))
    engine.run()
    assert engine.scheduler.num_preempted > 0
    assert [engine.tokens(row) for row in rows] == [engine.model.generate(p, new) for p, new in asked]


def test_what_was_generated_with_drafts_is_found_by_later_prompts() -> None:
    engine = TurnedEngine(num_pages=65, speculate_rows=4, draft_rate=0.6)
    engine.submit(generate_row(prompt(9), 25))
    engine.run()
    longer = (*prompt(9), *engine.model.generate(prompt(9), 25))
    (row,) = engine.submit(generate_row(longer, 12))
    engine.run()
    assert row.num_cached >= (9 + 24) // 4 * 4 - 4
    assert engine.tokens(row) == engine.model.generate(longer, 12)


def test_a_step_that_fails_in_between_harms_nobody_else() -> None:
    engine = TurnedEngine(speculate_rows=4, draft_rate=0.7, fail_result=[5])
    asked = [(prompt(6, i), 20) for i in range(3)]
    rows = engine.submit(*(generate_row(p, new) for p, new in asked))
    late = []
    for _ in range(4):
        engine.loop.turn()
    late = engine.submit(generate_row(prompt(6, 9), 20))
    engine.run()
    assert all(isinstance(engine.last(row).error, StepFailed) for row in rows)
    assert engine.tokens(late[0]) == engine.model.generate(prompt(6, 9), 20)


@pytest.mark.parametrize("bad", [3, 4, 5])
def test_logits_after_a_draft_that_are_not_finite_end_the_row(bad: int) -> None:
    """The context that ends with token `bad` of the answer has no finite logits, whichever half of a step meets it."""
    answer = ToyModel().generate(prompt(6), 12)
    model = ToyModel(poisoned=frozenset({(*prompt(6), *answer[:bad])}))
    engine = TurnedEngine(model=model, speculate_rows=4, draft_rate=1.0)
    broken, fine = engine.submit(generate_row(prompt(6), 12), generate_row(prompt(6, 1), 12))
    engine.run()
    assert isinstance(engine.last(broken).error, StepFailed)
    assert engine.tokens(broken) == answer[: len(engine.tokens(broken))]
    assert bad - 1 <= len(engine.tokens(broken)) <= bad
    assert engine.tokens(fine) == model.generate(prompt(6, 1), 12)


def test_a_constrained_row_goes_token_by_token_beside_rows_with_drafts() -> None:
    engine = TurnedEngine(speculate_rows=4, draft_rate=1.0)
    sets = [np.random.default_rng(i).choice(320, 4, replace=False).tolist() for i in range(10)]
    constraint = Slotted(sets)
    tied, free = engine.submit(generate_row(prompt(5), 20, constraint=constraint), generate_row(prompt(5, 1), 20))
    engine.run()
    assert engine.tokens(tied) == constraint.reference(engine.model, prompt(5)) == constraint.pushed
    assert engine.tokens(free) == engine.model.generate(prompt(5, 1), 20)
    lengths = {tuple(b.length[:2]) for b in engine.runner.batches if b.bucket.kind is Kind.SPECULATE}
    assert (1, 2) in lengths


def test_both_tokens_bring_their_log_probabilities_and_alternatives() -> None:
    engine = TurnedEngine(speculate_rows=1, draft_rate=1.0)
    (row,) = engine.submit(generate_row(prompt(5), 9, top_logprobs=3))
    engine.run()
    context = list(prompt(5))
    for token in [t for update in engine.updates[row] for t in update.tokens]:
        logprobs = engine.model.logprobs(context)
        assert token.logprob == pytest.approx(float(logprobs[token.token_id]))
        assert [i for i, _ in token.top] == np.argsort(-logprobs, kind="stable")[:3].tolist()
        context.append(token.token_id)


# On the device

CONFIG = EngineConfig(
    max_slots=4, page_size=8, num_pages=40, hard_size=4, soft_size=2, max_context=64, prefill_chunk=16, speculate_rows=2
)
PLAIN = (Bucket(Kind.EXTEND, 2, 16, 8), Bucket(Kind.DECODE, 4, 1, 8))
SPECULATIVE = (*PLAIN, Bucket(Kind.SPECULATE, 1, 2, 8), Bucket(Kind.SPECULATE, 2, 2, 8))


def started(model: Transformer, *, speculates: bool) -> Driven:
    config = changed(CONFIG, speculate=speculates)
    runner = JaxRunner(model, config, max_context=64, buckets=SPECULATIVE if speculates else PLAIN)
    runner.warmup(lambda done, total: None)
    return Driven(runner, config)


def answers(driven: Driven, *rows: Prepared) -> list[list[TokenLogprob]]:
    got = driven.run(*rows)
    assert all(update.error is None for updates in got for update in updates)
    return [[token for update in updates for token in update.tokens] for updates in got]


@pytest.fixture(scope="module")
def model() -> Transformer:
    """Embeddings are loud, so that the next token is mostly the last one's doing, and the MTP layer hears that token
    alone: its guesses are often right."""
    model = tiny_model(3)
    model.embed_tokens.embedding[...] = model.embed_tokens.embedding[...] * 150
    eye = jnp.eye(model.config.hidden_size)
    model.mtp[0].eh_proj.kernel[...] = jnp.concatenate([eye * 3, eye * 0], axis=1)
    return model


@pytest.fixture(scope="module")
def pair(model: Transformer, quick_compile: None) -> Iterator[tuple[Driven, Driven]]:
    pair = started(model, speculates=False), started(model, speculates=True)
    yield pair
    for driven in pair:
        driven.runner.close()


@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_the_device_gives_the_tokens_of_plain_decoding(pair: tuple[Driven, Driven], temperature: float) -> None:
    plain, speculative = pair
    compiled = speculative.runner.num_compiles
    rows = [
        Prepared(prompt(n, n), SamplingParams(max_tokens=new, temperature=temperature, seed=n, top_p=0.9))
        for n, new in ((1, 30), (7, 25), (17, 40), (33, 20), (50, 13), (8, 1), (9, 2))
    ]
    expected, got = answers(plain, *rows), answers(speculative, *rows)
    expected += [tokens for row in rows for tokens in answers(plain, row)]  # and one at a time: prefix hits among them
    got += [tokens for row in rows for tokens in answers(speculative, row)]
    for wanted, tokens in zip(expected, got, strict=True):
        assert [t.token_id for t in tokens] == [t.token_id for t in wanted]
        assert [t.logprob for t in tokens] == pytest.approx([t.logprob for t in wanted], abs=1e-4)
    generation = speculative.scheduler.generation
    rate = generation.num_accepted / generation.num_drafted
    assert 0.1 < rate < 0.95
    assert speculative.stats.steps[Kind.SPECULATE] > 0 < speculative.stats.steps[Kind.DECODE]
    assert speculative.runner.num_compiles == compiled


def test_penalties_and_masks_see_both_tokens(pair: tuple[Driven, Driven]) -> None:
    rows = [
        Prepared(prompt(9, n), SamplingParams(max_tokens=24, temperature=0.0, **params))  # type: ignore[arg-type]
        for n, params in enumerate(
            (
                {"frequency_penalty": 0.3},
                {"repetition_penalty": 1.05, "presence_penalty": 0.1},
                {"logit_bias": ((5, 3.0),)},
            )
        )
    ]
    plain, speculative = ([[t.token_id for t in tokens] for row in rows for tokens in answers(d, row)] for d in pair)
    assert plain == speculative


def test_pages_hold_the_mtp_layers_part(pair: tuple[Driven, Driven], model: Transformer) -> None:
    plain, speculative = (driven.runner for driven in pair)
    assert speculative.page_bytes * len(model.layers) == plain.page_bytes * (len(model.layers) + 1)
    content = np.arange(2 * speculative.page_bytes // 4, dtype=np.float32).reshape(2, -1)
    speculative.write_pages([3, 9], content.view(np.uint8))
    assert np.array_equal(speculative.read_pages([9, 3]).result().view(np.float32), content[::-1])


def test_a_model_without_an_mtp_layer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"engine\.speculate: this model has no MTP layer"):
        JaxRunner(tiny_model(num_nextn_predict_layers=0), changed(CONFIG, speculate=True), max_context=64)
