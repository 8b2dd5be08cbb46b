"""The slots' logit tables behind the border: generation against the full forward, adjusted as the definitions say."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy.typing import NDArray

from model.adjust import PROMPT
from model.transformer import Transformer
from serving.batch import Batch, Bucket, Kind, SlotMask, SlotTable
from serving.config import EngineConfig
from serving.engine.runner import JaxRunner
from serving.engine.step import padding
from serving.engine.tables import MASKS_AT_ONCE, dense, pack_ids
from tests.fakes_model import tiny_model
from tests.fakes_tables import RowTable

VOCAB, ROWS, PAGES = 320, 4, 4
CONFIG = EngineConfig(max_slots=20, page_size=8, num_pages=40, max_context=32)
EXTEND, DECODE = Bucket(Kind.EXTEND, ROWS, 16, PAGES), Bucket(Kind.DECODE, ROWS, 1, PAGES)


pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture(scope="module")
def model() -> Transformer:
    return tiny_model(7)


@pytest.fixture(scope="module")
def runner(model: Transformer, quick_compile: None) -> Iterator[JaxRunner]:
    runner = JaxRunner(model, CONFIG, max_context=32, buckets=[EXTEND, DECODE])
    runner.warmup(lambda done, total: None)
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def logits(model: Transformer) -> "Logits":
    return Logits(model)


class Logits:
    """[vocab] after a context, by one full forward at a fixed shape."""

    def __init__(self, model: Transformer) -> None:
        graph, params = nnx.split(model)

        @jax.jit
        def forward(params: nnx.State, tokens: jax.Array) -> jax.Array:
            merged: Transformer = nnx.merge(graph, params)
            return merged.logits(merged.hidden(tokens, jnp.arange(32)[None, :]))[0]

        self._forward, self._params = forward, params

    def __call__(self, context: Sequence[int]) -> NDArray[np.float32]:
        padded = np.zeros((1, 32), np.int32)
        padded[0, : len(context)] = context
        return np.asarray(self._forward(self._params, padded))[len(context) - 1]


@dataclass
class Row:
    slot: int
    prompt: list[int]
    penalties: tuple[float, float, float] = (1.0, 0.0, 0.0)
    bias: dict[int, float] = field(default_factory=dict)
    allowed: tuple[int, ...] | None = None
    adjusts: bool = True
    context: list[int] = field(default_factory=list)

    @property
    def table(self) -> SlotTable:
        generated = np.array(self.context[len(self.prompt) :], np.int32)
        return SlotTable(self.slot, np.array(self.prompt, np.int32), generated, tuple(self.bias.items()), self.allowed)


def batch(bucket: Bucket, rows: Sequence[Row]) -> Batch:
    """The next step of `rows`: the whole context where the bucket takes it, else the last token."""
    empty = padding(bucket)
    for r, row in enumerate(rows):
        whole = bucket.kind is Kind.EXTEND
        empty.length[r] = len(row.context) if whole else 1
        empty.start[r] = 0 if whole else len(row.context) - 1
        if whole:
            empty.tokens[r, : len(row.context)] = row.context
        empty.slot[r], empty.table[r] = row.slot, row.slot if row.adjusts else 0
        empty.page_table[r] = 1 + r * PAGES + np.arange(PAGES)
        empty.repetition_penalty[r], empty.presence_penalty[r], empty.frequency_penalty[r] = row.penalties
    return empty


def generate(runner: JaxRunner, rows: Sequence[Row], num_tokens: int) -> list[list[int]]:
    for row in rows:
        row.context = row.context or list(row.prompt)
    before = [len(row.context) for row in rows]
    step = replace(batch(EXTEND, rows), set_tables=tuple(row.table for row in rows if row.adjusts))
    for i in range(num_tokens):
        out = runner.submit(step).result()
        for r, row in enumerate(rows):
            row.context.append(int(out.token[r]))
        if i < num_tokens - 1:
            step = batch(DECODE, rows)
    return [row.context[n:] for row, n in zip(rows, before, strict=True)]


def expected(logits: Logits, row: Row, num_tokens: int, start: Sequence[int] = ()) -> list[int]:
    table = RowTable(frozenset(row.prompt), Counter(start), row.bias, None)
    table.allowed = None if row.allowed is None else frozenset(row.allowed)
    context = [*row.prompt, *start]
    for _ in range(num_tokens):
        token = int(table.adjusted(logits(context), *row.penalties).argmax())
        table.generated[token] += 1
        context.append(token)
    return context[len(row.prompt) + len(start) :]


FEW = tuple(range(40, 46))  # so few that tokens come again


def test_generation_is_what_the_definitions_say(runner: JaxRunner, logits: Logits) -> None:
    runner.reset()
    rows = [
        Row(2, [5, 40, 41, 9], penalties=(1.7, 0.0, 0.0), allowed=FEW),
        Row(1, [5, 6, 7], adjusts=False),
        Row(20, [8, 9], penalties=(1.0, 0.3, 0.25), allowed=FEW),
        Row(7, [30, 31, 32], penalties=(0.8, -0.5, 0.1), bias={3: 2.0, 4: 1.5, 60: -50.0}),
    ]
    wanted = [expected(logits, row, 10) for row in rows]
    assert generate(runner, rows, 10) == wanted
    assert len(set(wanted[0])) > 1


def test_a_slot_that_is_reused_knows_nothing_of_its_last_owner(runner: JaxRunner, logits: Logits) -> None:
    runner.reset()
    first = Row(2, [40, 41], penalties=(3.0, 1.0, 1.0), bias={50: 100.0}, allowed=(*FEW, 50))
    generate(runner, [first], 8)
    plain, adjusting = Row(2, [5, 6, 7], adjusts=False), Row(2, [5, 6, 7], penalties=(1.3, 0.2, 0.2))
    assert generate(runner, [plain], 6) == [expected(logits, plain, 6)]
    assert generate(runner, [adjusting], 6) == [expected(logits, adjusting, 6)]


def test_a_row_that_is_resumed_goes_on_as_if_it_had_not_stopped(runner: JaxRunner, logits: Logits) -> None:
    runner.reset()
    row = Row(3, [40, 9], penalties=(1.4, 0.4, 0.3), allowed=FEW)
    (start,) = generate(runner, [row], 5)
    runner.reset()
    resumed = replace(row, slot=5, context=[*row.prompt, *start])
    assert generate(runner, [resumed], 5) == [expected(logits, row, 5, start)]
    assert expected(logits, row, 10)[5:] == expected(logits, row, 5, start)


def test_masks_hold_from_the_step_that_brings_them(runner: JaxRunner) -> None:
    """More of them than go in one transfer; a later one replaces the earlier one."""
    runner.reset()
    row = Row(20, [5, 6], context=[5, 6])
    others = [SlotMask(slot, pack_ids((1,), VOCAB)) for slot in range(1, MASKS_AT_ONCE + 1)]
    step, tables = batch(EXTEND, [row]), (row.table,)
    for token in (7, 319, 0, 33):
        masks = (*others, SlotMask(20, pack_ids((token,), VOCAB)))
        out = runner.submit(replace(step, set_tables=tables, set_masks=masks)).result()
        assert out.token[0] == token
        row.context.append(token)
        step, tables = batch(DECODE, [row]), ()


def test_nothing_compiles_and_no_step_copies_the_tables(runner: JaxRunner) -> None:
    before = runner.num_compiles
    generate(runner, [Row(4, [5], bias={3: 1.0})], 3)
    assert runner.num_compiles == before
    copied = re.compile(rf"= [sfu]32\[{CONFIG.max_slots + 1},\d+\]\S* copy\(")
    for bucket, program in runner._programs.items():
        assert not copied.findall(program.run.as_text()), bucket  # type: ignore[attr-defined]


def test_without_tables_rows_that_need_them_are_refused(model: Transformer) -> None:
    bare = JaxRunner(
        model, EngineConfig(max_slots=20, page_size=8, num_pages=40, sampling_tables=False), max_context=32,
        buckets=[EXTEND],
    )  # fmt: skip
    bare.warmup(lambda done, total: None)
    plain, adjusting = Row(2, [5, 6, 7], adjusts=False), Row(2, [5, 6, 7])
    with pytest.raises(ValueError, match="sampling_tables"):
        generate(bare, [adjusting], 1)
    assert len(generate(bare, [plain], 1)[0]) == 1
    bare.close()


def test_a_row_as_arrays() -> None:
    row = SlotTable(1, np.array([2, 3, 3]), np.array([3, 4, 4]), ((0, -1.5), (4, 2.0)), None)
    counts, bias, allowed = dense(row, 40)
    assert counts[:6].tolist() == [0, 0, PROMPT, PROMPT + 1, 2, 0]
    assert bias[:5].tolist() == [-1.5, 0, 0, 0, 2.0]
    assert allowed.tolist() == [0xFFFFFFFF, 0xFFFFFFFF]


@pytest.mark.parametrize("ids", [(0,), (31, 32), (39,), ()])
def test_ids_as_bits(ids: tuple[int, ...]) -> None:
    words = pack_ids(ids, 40)
    assert [i for i in range(64) if int(words[i // 32]) >> i % 32 & 1] == list(ids)
