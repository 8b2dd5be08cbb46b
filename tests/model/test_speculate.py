"""Speculative steps give what plain steps give, token by token, and leave in the cache what the MTP layer needs."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy.typing import NDArray

from model.adjust import Adjust, neutral_tables
from model.cache import init_cache, page_bytes
from model.checkpoint import load_hub
from model.drafts import Drafts
from model.sampling import Sampling
from model.speculate import speculate_step
from model.steps import DeviceState, StepInput, decode_step, extend_step
from model.transformer import Transformer
from tests.model.shared import GOLDEN

TOP, PROMPT, NEW, CONTEXT = 3, 11, 24, 64
SPECULATE = ("speculate",)
MIXED = ("speculate", "speculate", "decode")

pytestmark = pytest.mark.usefixtures("quick_compile")


@dataclass
class Wanted:
    """How rows sample."""

    sampling: Sampling
    adjust: Adjust

    @classmethod
    def of(cls, rows: int, temperature: float, *, seed: int = 0, top_k: int = 0, adjusts: bool = False) -> "Wanted":
        seeds = np.stack([np.arange(rows) + 1000 * seed, np.full(rows, 5)], axis=1)
        ones, table = np.ones(rows, np.float32), np.arange(1, rows + 1, dtype=np.int32)
        draws = (ones * temperature, table * 0 + top_k, ones, ones * 0, np.uint32(seeds))
        adjust = (table, ones * 1.3, ones * 0.4, ones * 0.6) if adjusts else (table * 0, ones, ones * 0, ones * 0)
        return cls(Sampling(*map(jnp.asarray, draws)), Adjust(*map(jnp.asarray, adjust)))


@dataclass
class Run:
    """What rows got. `state`: the device's at the end."""

    state: DeviceState
    tokens: list[list[int]]
    logprobs: list[list[float]]
    drafted: int = 0
    accepted: int = 0


class Served:
    """Compiled steps of one model, over pages of `page` tokens."""

    def __init__(self, model: Transformer, page: int, *, speculates: bool) -> None:
        self.model, self.page, self.speculates = model, page, speculates
        graph, self.params = nnx.split(model)

        def run(step: Any, params: Any, *args: Any) -> Any:
            return step(nnx.merge(graph, params), *args, num_top=TOP)

        steps = {"extend": extend_step, "decode": decode_step, "speculate": speculate_step}
        self.steps = {name: jax.jit(partial(run, step)) for name, step in steps.items()}
        self.fresh = jax.jit(self._fresh, static_argnums=0)

    def _fresh(self, rows: int) -> DeviceState:
        """What earlier owners may have left: NaN in every page, positions and drafts in every slot."""
        pages, slots = 1 + rows * CONTEXT // self.page, rows + 1
        pools = init_cache(self.model.config, pages, self.page, jnp.dtype(jnp.float32), mtp=self.speculates)
        drafts = Drafts(jnp.full(slots, 99, jnp.int32), jnp.full(slots, 7, jnp.int32)) if self.speculates else None
        tables = neutral_tables(slots, self.model.config.vocab_size)
        return DeviceState(jax.tree.map(lambda p: p * jnp.nan, pools), jnp.zeros(slots, jnp.int32), tables, drafts)

    def batch(self, tokens: NDArray[np.int32], start: list[int], length: list[int], wanted: Wanted) -> StepInput:
        rows, pages = len(start), CONTEXT // self.page
        ints = partial(jnp.asarray, dtype=jnp.int32)
        slot = np.where(np.asarray(length) > 0, 1 + np.arange(rows), 0)
        return StepInput(
            tokens=ints(tokens), next_token=ints([0] * rows), start=ints(start), length=ints(length),
            page_table=ints(1 + np.arange(rows * pages).reshape(rows, pages)), slot=ints(slot),
            targets=ints([[3]] * rows), sampling=wanted.sampling, want_top=jnp.asarray(True),
            want_prompt=jnp.asarray(False), adjust=wanted.adjust,
        )  # fmt: skip

    def generate(
        self,
        prompts: NDArray[np.int32],
        wanted: Wanted,
        *,
        plan: tuple[str, ...] = ("decode",),
        new: int = NEW,
        guess: Callable[[list[int]], int] | None = None,
    ) -> Run:
        """`plan`: the kinds of step in turn. `guess`: makes drafts of a row's tokens, instead of the MTP layer."""
        rows = len(prompts)
        lengths = [PROMPT] * rows
        state, out = self.steps["extend"](
            self.params, self.fresh(rows), self.batch(prompts, [0] * rows, lengths, wanted)
        )
        run = Run(state, [[int(t)] for t in out.token], [[float(p)] for p in out.logprob])
        turn = 0
        while min(map(len, run.tokens)) < new:
            kind, turn = plan[turn % len(plan)], turn + 1
            width = 2 if kind == "speculate" else 1
            length = [min(width, new - len(tokens)) for tokens in run.tokens]
            start = [-77] * rows if self.speculates else [PROMPT + len(tokens) - 1 for tokens in run.tokens]
            if guess is not None:
                run.state = _told(run, new, guess)
            fed = np.zeros((rows, width), np.int32)
            run.state, out = self.steps[kind](self.params, run.state, self.batch(fed, start, length, wanted))
            _take(run, out, length)
        return run


def _told(run: Run, new: int, guess: Callable[[list[int]], int]) -> DeviceState:
    """Rows that are done keep the MTP layer's own draft."""
    assert run.state.drafts is not None
    draft = np.array(run.state.drafts.token)
    for r, tokens in enumerate(run.tokens):
        if len(tokens) < new:
            draft[1 + r] = guess(tokens)
    return run.state._replace(drafts=run.state.drafts._replace(token=jnp.asarray(draft)))


def knows(expected: list[list[int]]) -> Callable[[list[int]], int]:
    """Right two times of three about rows that will have `expected`, which differ in their first tokens."""
    rng = np.random.default_rng(0)
    rows = {tuple(tokens[:1]): tokens for tokens in expected}
    assert len(rows) == len(expected)
    return lambda tokens: rows[tuple(tokens[:1])][len(tokens)] if rng.random() < 2 / 3 else 1


def _take(run: Run, out: Any, length: list[int]) -> None:
    rows = len(length)
    for r in range(rows):
        places = [r] * (length[r] > 0)
        if out.accepted is not None and length[r]:
            run.drafted, run.accepted = run.drafted + bool(out.drafted[r]), run.accepted + bool(out.accepted[r])
            places += [rows + r] * bool(out.accepted[r])
        run.tokens[r] += [int(out.token[p]) for p in places]
        run.logprobs[r] += [float(out.logprob[p]) for p in places]
        assert all(bool(out.finite[p]) for p in places)


@pytest.fixture(scope="module")
def model() -> Transformer:
    return load_hub(GOLDEN / "v3")


@pytest.fixture(scope="module")
def pair(model: Transformer) -> tuple[Served, Served]:
    """The same model, plain and speculative; rows cross pages."""
    return Served(model, 4, speculates=False), Served(model, 4, speculates=True)


def prompts(seed: int, rows: int = 4) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, 256, (rows, PROMPT)).astype(np.int32)


@pytest.mark.parametrize("plan", [SPECULATE, MIXED])
@pytest.mark.parametrize(("temperature", "adjusts"), [(0.0, False), (0.7, False), (0.0, True), (0.7, True)])
def test_tokens_equal_plain_decoding(
    pair: tuple[Served, Served], temperature: float, adjusts: bool, plan: tuple[str, ...]
) -> None:
    plain, speculative = pair
    for seed in range(2):
        wanted = Wanted.of(4, temperature, seed=seed, adjusts=adjusts)
        expected = plain.generate(prompts(seed), wanted)
        for guess in (None, knows(expected.tokens)):
            got = speculative.generate(prompts(seed), wanted, plan=plan, guess=guess)
            assert got.tokens == expected.tokens
            np.testing.assert_allclose(np.concatenate(got.logprobs), np.concatenate(expected.logprobs), atol=2e-4)
        assert got.drafted / 2 < got.accepted < got.drafted, "both outcomes, many times"


@pytest.mark.parametrize("plan", [SPECULATE, MIXED, ("decode", "speculate")])
def test_drafts_are_the_mtp_layers_own_predictions(
    pair: tuple[Served, Served], model: Transformer, plan: tuple[str, ...]
) -> None:
    """The draft after many steps, rejections among them, is what the MTP layer says without a cache."""
    _, speculative = pair
    wanted, uncached_guess = Wanted.of(4, 0.0), make_uncached_guess(model)
    expected = speculative.generate(prompts(0), wanted, plan=("decode",)).tokens
    checked = 0
    for new in (1, *range(6, NEW, 3)):
        run = speculative.generate(prompts(0), wanted, plan=plan, new=new, guess=knows(expected))
        assert run.state.drafts is not None
        for r in range(4):
            tokens = np.concatenate([prompts(0)[r], run.tokens[r]])[None, :]
            assert int(run.state.drafts.position[1 + r]) == tokens.shape[1] - 1
            draft = int(run.state.drafts.token[1 + r])
            if draft >= 0:
                assert draft == uncached_guess(tokens)
                checked += 1
    assert checked >= 10


def make_uncached_guess(model: Transformer) -> Callable[[NDArray[np.int64]], int]:
    """Of the token after the last one."""
    graph, params = nnx.split(model)

    @jax.jit
    def guesses(params: Any, padded: jax.Array) -> jax.Array:
        merged: Transformer = nnx.merge(graph, params)
        hidden = merged.hidden(padded, jnp.arange(CONTEXT)[None, :])
        return merged.mtp_logits(hidden[:, :-1], padded[:, 1:])[0].argmax(-1)

    def guess(tokens: NDArray[np.int64]) -> int:
        length = tokens.shape[1]
        return int(guesses(params, np.pad(tokens.astype(np.int32), ((0, 0), (0, CONTEXT - length))))[length - 2])

    return guess


def test_sampled_tokens_have_the_models_distribution(model: Transformer) -> None:
    """Rows of one prompt with different seeds, drafts right and wrong: at each place a chi-square of what they drew
    against the exact probabilities after what they had, from the full forward."""
    rows, exact = 640, Exact(model)
    served, wanted = Served(model, 16, speculates=True), Wanted.of(640, 1.0, top_k=3)
    prompt = prompts(1, 1)[0].tolist()
    tokens = served.generate(
        np.repeat(prompts(1, 1), rows, axis=0), wanted, plan=SPECULATE, new=4, guess=lambda t: exact.best([*prompt, *t])
    ).tokens
    chi2, cells = 0.0, 0
    for place in range(4):
        contexts = [tuple(row[:place]) for row in tokens]
        for context in set(contexts):
            drawn = [row[place] for row, its in zip(tokens, contexts, strict=True) if its == context]
            p = exact([*prompt, *context])
            assert set(drawn) <= set(p)
            if len(drawn) >= 40:
                chi2 += sum((drawn.count(t) - p[t] * len(drawn)) ** 2 / (p[t] * len(drawn)) for t in p)
                cells += len(p) - 1
    assert cells >= 20
    assert abs(chi2 - cells) < 4 * np.sqrt(2 * cells)


class Exact:
    """What top_k = 3 leaves of the distribution after a context, by the full forward."""

    def __init__(self, model: Transformer) -> None:
        graph, params = nnx.split(model)
        self._seen: dict[tuple[int, ...], dict[int, float]] = {}

        @jax.jit
        def forward(tokens: jax.Array) -> jax.Array:
            merged: Transformer = nnx.merge(graph, params)
            return merged.logits(merged.hidden(tokens, jnp.arange(16)[None, :]))[0]

        self._forward = forward

    def __call__(self, context: list[int]) -> dict[int, float]:
        key = tuple(context)
        if key not in self._seen:
            logits = np.asarray(self._forward(np.array([context + [0] * (16 - len(context))], np.int32)))
            best = np.argsort(-logits[len(context) - 1])[:3]
            p = np.exp(logits[len(context) - 1, best].astype(np.float64))
            self._seen[key] = dict(zip(best.tolist(), (p / p.sum()).tolist(), strict=True))
        return self._seen[key]

    def best(self, context: list[int]) -> int:
        p = self(context)
        return max(p, key=p.__getitem__)


def test_the_mtp_layer_has_a_pool_of_its_own(model: Transformer) -> None:
    dtype = jnp.dtype(jnp.float32)
    plain, with_mtp = (init_cache(model.config, 3, 4, dtype, mtp=mtp) for mtp in (False, True))
    assert len(with_mtp) == len(plain) + 1
    for mtp, pools in ((False, plain), (True, with_mtp)):
        assert page_bytes(model.config, 4, dtype, mtp=mtp) == sum(pool[0].nbytes for pool in pools)


def test_a_state_without_drafts_is_refused(model: Transformer) -> None:
    served = Served(model, 64, speculates=False)
    batch = served.batch(np.zeros((1, 2), np.int32), [0], [2], Wanted.of(1, 0.0))
    with pytest.raises(AssertionError, match="without drafts"):
        served.steps["speculate"](served.params, served.fresh(1), batch)
