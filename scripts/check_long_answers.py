"""Do long answers rot when others run? python -m scripts.check_long_answers [--tokens 4096] [--streams 32] [--alone 4]

Case A35 in the deterministic mode: greedy answers of `--tokens` tokens, some of them alone first, then all at once with
arrivals one after the other and as many requests again that are cancelled on their way: once with pages for all, once
with pages for a third of them (rows are stopped and start again) and every prompt's first half in the prefix cache.
Prints per condition how many answers have the same token ids and log-probabilities, bit for bit, as each alone, and how
many 20-grams come twice or more in an answer, alone and among others. Floor: equal everywhere, and the second condition
was met.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from model.load import load_model
from model.transformer import Transformer
from scripts.determinism_rig import Answer, one_by_one, running, submit
from scripts.report import finish, parser
from serving.config import EngineConfig
from serving.engine.engine import Engine
from serving.engine.ticket import Ticket
from serving.types import Job, Prepared, SamplingParams

ZOO = Path(__file__).resolve().parent.parent / "model" / "zoo"
PROMPT, PAGE, GRAM = 48, 16, 20
Answers = list[Answer]


def rows_of(count: int, tokens: int, vocab: int) -> list[Prepared]:
    rng = np.random.default_rng(35)
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0)
    return [Prepared(tuple(rng.integers(2, vocab, PROMPT).tolist()), sampling) for _ in range(count)]


def config_of(streams: int, tokens: int, share: float) -> EngineConfig:
    """Pages for that share of all answers at their full length."""
    pages = -(-(PROMPT + tokens) // PAGE)
    return EngineConfig(
        max_slots=streams, page_size=PAGE, num_pages=1 + max(pages, int(share * streams * pages)),
        max_context=PROMPT + tokens, prefill_chunk=64, prefill_batch_tokens=64, max_score_rows=1, max_score_tokens=32,
    )  # fmt: skip


def staggered(engine: Engine, rows: Sequence[Prepared], tenant: str) -> Answers:
    """Each comes when the one before it has begun to answer, and beside it one that leaves when the next has come."""
    answers: Answers = []
    leaving: list[Ticket] = []
    for row in rows:
        leaving.append(engine.submit(Job(id="leaves", tenant=tenant, rows=(_another(row),)), Answer()))
        answers.append(submit(engine, row, tenant))
        answers[-1].started.wait()
        for ticket in leaving[:-1]:
            ticket.cancel()
    leaving[-1].cancel()
    return [answer.wait() for answer in answers]


def _another(row: Prepared) -> Prepared:
    """The same prompt but for its last token."""
    return Prepared((*row.token_ids[:-1], row.token_ids[0]), row.sampling)


def repeated(ids: Sequence[int]) -> int:
    """20-grams of `ids` that come more than once."""
    grams = Counter(tuple(ids[i : i + GRAM]) for i in range(len(ids) - GRAM + 1))
    return sum(count > 1 for count in grams.values())


def warm_halves(engine: Engine, rows: Sequence[Prepared], tenant: str) -> None:
    halves = [Prepared((*row.token_ids[: PROMPT // 2], 3), SamplingParams(max_tokens=1)) for row in rows]
    one_by_one(engine, halves, tenant)


def check(model: Transformer, tokens: int, streams: int, alone: int) -> list[dict[str, Any]]:
    rows, table = rows_of(streams, tokens, model.config.vocab_size), []
    with running(model, config_of(streams, tokens, 1.0), deterministic=True) as engine:
        known = one_by_one(engine, rows[:alone], "alone")
        table.append(line("pages for all", staggered(engine, rows, "many"), known, engine))
    with running(model, config_of(streams, tokens, 1 / 3), deterministic=True) as engine:
        warm_halves(engine, rows, "halves")
        table.append(line("pages for a third, halves cached", staggered(engine, rows, "halves"), known, engine))
    return table


def line(condition: str, answers: Answers, known: Answers, engine: Engine) -> dict[str, Any]:
    pairs = list(zip(answers, known, strict=False))
    return {
        "condition": condition,
        "streams": len(answers),
        "compared": len(pairs),
        "same_ids": sum(a.ids == b.ids for a, b in pairs),
        "same_bits": sum(a.bits == b.bits for a, b in pairs),
        "repeated_alone": sum(repeated(answer.ids) for answer in known),
        "repeated_among": sum(repeated(answer.ids) for answer, _ in pairs),
        "preemptions": engine.stats.preemptions,
        "cached_tokens": engine.stats.cached_tokens,
        "pages_used": engine.stats.pages_used,
    }


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--model", type=Path, default=ZOO / "credit-mini", help="a model directory")
    options.add_argument("--tokens", type=int, default=4096, help="tokens of each answer")
    options.add_argument("--streams", type=int, default=32, help="answers at once")
    options.add_argument("--alone", type=int, default=4, help="answers that are asked for alone first")
    args = options.parse_args(argv)
    table = check(load_model(args.model), args.tokens, args.streams, min(args.alone, args.streams))
    equal = all(row["compared"] == row["same_ids"] == row["same_bits"] for row in table)
    provoked = table[-1]["preemptions"] > 0 and table[-1]["cached_tokens"] > 0
    figure = f"{'equal' if equal else 'NOT equal'} to each alone, {args.streams} streams of {args.tokens} tokens"
    figure += "" if provoked else "; no row was stopped, or no prefix cached: nothing was shown"
    return finish(table, figure, ok=equal and provoked, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
