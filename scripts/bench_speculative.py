"""Tokens/s of one stream with MTP speculative decoding and without: python -m scripts.bench_speculative [--model DIR]

Two engines on one model in this process, the same requests one at a time, first to one and then to the other, turn by
turn: the starts of test rows, which the model continues to their ends. The model is of credit-mini's form with more
layers, trained here once to continue rows (scripts/speculative_model.py, some minutes) and kept in .cache, or DIR: a
hub directory with credit-mini's tokenizer and an MTP layer (model/zoo/credit-mini is one). Prints each turn; the figure
is the median ratio, greedy and at temperature 0.7, with the share of drafts that were accepted. Floor, greedy: 1.3.
"""

import queue
import statistics
import sys
import time
from pathlib import Path

from msgspec.structs import replace

from model.load import load_model
from model.transformer import Transformer
from scripts.report import finish, parser
from scripts.speculative_model import read_rows, train
from serving.config import EngineConfig
from serving.engine.engine import Engine
from serving.engine.runner import JaxRunner, use_compilation_cache
from serving.types import Job, Prepared, SamplingParams, Update

ROOT = Path(__file__).parent.parent
CONTEXT, PROMPT, FLOOR, SAME = 128, 8, 1.3, 0.99
CONFIG = EngineConfig(max_slots=8, max_context=CONTEXT, max_score_rows=1, max_score_tokens=32)

Tokens = list[int]


def start(model: Transformer, *, speculate: bool) -> Engine:
    config = replace(CONFIG, speculate=speculate)
    engine = Engine(JaxRunner(model, config, max_context=CONTEXT), config, max_context=CONTEXT)
    engine.start()
    while not engine.wait_ready(1.0):
        continue
    if engine.failure is not None:
        raise engine.failure
    return engine


def ask(engine: Engine, prompt: tuple[int, ...], sampling: SamplingParams) -> Tokens:
    """The answer, once it is complete."""
    news: queue.SimpleQueue[Update] = queue.SimpleQueue()

    def listen(updates: tuple[Update, ...]) -> None:
        for update in updates:
            news.put(update)

    engine.submit(Job("job", "bench", (Prepared(prompt, sampling),)), listen)
    tokens: Tokens = []
    while True:
        update = news.get()
        tokens += [token.token_id for token in update.tokens]
        if update.error is not None:
            raise update.error
        if update.finish is not None:
            return tokens


class Bench:
    """Turns of both engines on the same prompts."""

    def __init__(self, model: Transformer, prompts: list[tuple[int, ...]], num_tokens: int) -> None:
        self._engines = [start(model, speculate=speculate) for speculate in (False, True)]
        self._prompts, self._num_tokens = prompts, num_tokens
        self._num_asked = self.num_different = 0
        self.rows: list[dict[str, float]] = []

    def run(self, temperature: float, turns: int, requests: int) -> tuple[float, float]:
        """Median ratio of tokens/s, and the share of drafts that were accepted."""
        stats = self._engines[1].stats
        drafted, accepted, ratios = stats.drafted_tokens, stats.accepted_tokens, []
        self._turn(temperature, 0, 2)  # not counted
        for turn in range(turns):
            plain, speculative = self._turn(temperature, turn * requests, requests)
            ratios.append(speculative / plain)
            self.rows.append(
                {"temperature": temperature, "plain_tokens_s": plain, "speculative": speculative, "ratio": ratios[-1]}
            )
        rate = (stats.accepted_tokens - accepted) / max(1, stats.drafted_tokens - drafted)
        return statistics.median(ratios), rate

    @property
    def same(self) -> float:
        """Share of answers that were equal to the token: logits of other shapes are other at the last digit."""
        return 1 - self.num_different / self._num_asked

    def close(self) -> None:
        for engine in self._engines:
            engine.close()

    def _turn(self, temperature: float, first: int, requests: int) -> list[float]:
        """Tokens/s of each engine."""
        prompts = [self._prompts[(first + i) % len(self._prompts)] for i in range(requests)]
        sampling = [
            SamplingParams(max_tokens=self._num_tokens, temperature=temperature, seed=first + i)
            for i in range(requests)
        ]
        speeds, answers = [], []
        for engine in self._engines:
            began = time.perf_counter()
            got = [ask(engine, *asked) for asked in zip(prompts, sampling, strict=True)]
            speeds.append(sum(map(len, got)) / (time.perf_counter() - began))
            answers.append(got)
        self._num_asked += requests
        self.num_different += sum(a != b for a, b in zip(*answers, strict=True))
        return speeds


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--model", type=Path, help="a hub directory; default: one that is trained here once")
    options.add_argument("--layers", type=int, default=4, help="of the model trained here (default %(default)s)")
    options.add_argument("--steps", type=int, default=400, help="to train it (default %(default)s)")
    options.add_argument("--tokens", type=int, default=100, help="of each answer (default %(default)s)")
    options.add_argument("--turns", type=int, default=10, help="of both engines (default %(default)s)")
    options.add_argument("--requests", type=int, default=5, help="a turn and engine (default %(default)s)")
    args = options.parse_args()
    use_compilation_cache(ROOT / ".cache" / "jax")
    directory = args.model or ROOT / ".cache" / f"speculative-{args.layers}-{args.steps}"
    if args.model is None and not (directory / "model.safetensors").is_file():
        train(directory, layers=args.layers, steps=args.steps)
    prompts = [row[:PROMPT] for row in read_rows("test.csv", args.turns * args.requests).prompts]
    bench = Bench(load_model(directory), prompts, args.tokens)
    greedy, greedy_rate = bench.run(0.0, args.turns, args.requests)
    sampled, sampled_rate = bench.run(0.7, args.turns, args.requests)
    bench.close()
    figure = (
        f"tokens/s of one stream, with over without speculation: greedy {greedy:.2f}x (floor {FLOOR}), drafts accepted "
        f"{greedy_rate:.0%}; temperature 0.7 {sampled:.2f}x, {sampled_rate:.0%}; answers equal {bench.same:.1%}"
    )
    return finish(bench.rows, figure, ok=greedy >= FLOOR and bench.same >= SAME, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
