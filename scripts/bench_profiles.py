"""Time to the first token on a profile, cold and from each tier: python -m scripts.bench_profiles [--profiles 4]

A model of V2's form with random weights (4 layers of 256; `--hidden`, `--layers` for larger ones) in this process, one
request at a time through the engine: a standing context of 2,048 tokens under a profile id, and a question of 24 that
differs each time. Cold: the first request. Device: the next one. Host: after other prompts have taken all pages of the
device. Disk: the first request of a new engine on the same directory. Prints medians; floor: each hit at least 5 times
quicker than cold.
"""

import queue
import statistics
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from model.config import ModelConfig
from model.transformer import Transformer
from scripts.make_bench_ckpt import PRESETS
from scripts.report import finish, parser
from serving.batch import Bucket, Kind
from serving.config import EngineConfig
from serving.engine.engine import Engine
from serving.engine.runner import JaxRunner, use_compilation_cache
from serving.types import Job, Prepared, SamplingParams, Update

ROOT = Path(__file__).parent.parent
PROFILE, QUESTION, CONTEXT, FLOOR = 2048, 24, 2304, 5.0
PAGES = CONTEXT // 16
BUCKETS = (
    Bucket(Kind.EXTEND, 1, 64, PAGES),
    Bucket(Kind.EXTEND, 1, 256, PAGES),
    Bucket(Kind.DECODE, 1, 1, PAGES),
)


def start(model: Transformer, directory: str) -> tuple[Engine, JaxRunner]:
    """A warm engine with pages for one row and a little more."""
    config = EngineConfig(max_slots=1, max_context=CONTEXT, num_pages=PAGES + PAGES // 4, profile_dir=directory)
    runner = JaxRunner(model, config, max_context=CONTEXT, buckets=BUCKETS)
    engine = Engine(runner, config, max_context=CONTEXT, fingerprint="bench")
    engine.start()
    while not engine.wait_ready(1.0):
        continue
    if engine.failure is not None:
        raise engine.failure
    return engine, runner


def tokens(seed: int, count: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(5, 4000, count).tolist())


def ask(engine: Engine, prompt: tuple[int, ...], profile: str | None) -> tuple[float, int]:
    """Seconds to the first token, and cached tokens; returns when the answer is complete."""
    news: queue.Queue[Update] = queue.Queue()
    row = Prepared(prompt, SamplingParams(max_tokens=2, temperature=0.0))

    def listen(updates: tuple[Update, ...]) -> None:
        for update in updates:
            news.put(update)

    began = time.perf_counter()
    engine.submit(Job("job", "t", (row,), profile_id=profile), listen)
    first = news.get()
    seconds = time.perf_counter() - began
    update = first
    while update.finish is None:
        if update.error is not None:
            raise update.error
        update = news.get()
    return seconds, first.num_cached


class Bench:
    def __init__(self, model: Transformer, num_profiles: int, directory: str) -> None:
        self._model, self._num, self._directory = model, num_profiles, directory
        self._asked = 0
        self.rows: list[dict[str, float | str]] = []

    def run(self) -> None:
        engine, _ = start(self._model, self._directory)
        self._flood(engine)  # all programs have run once
        cold, device = [], []
        for number in range(self._num):
            cold.append(self._ask(engine, number))
            self._ask(engine, number)  # what the two have in common is the profile from now on
            device.append(self._ask(engine, number))
        self._note("cold", cold)
        self._note("device", device)
        host = []
        for number in range(self._num):
            self._flood(engine)
            host.append(self._ask(engine, number))
        self._note("host", host)
        engine.close(10.0)
        engine, runner = start(self._model, self._directory)
        compiles = runner.num_compiles
        self._flood(engine)
        self._note("disk", [self._ask(engine, number) for number in range(self._num)])
        if runner.num_compiles != compiles:
            raise RuntimeError("a program was compiled after the warm-up")
        engine.close(0.0)

    def _ask(self, engine: Engine, number: int) -> tuple[float, int]:
        self._asked += 1
        return ask(engine, tokens(number, PROFILE) + tokens(10_000 + self._asked, QUESTION), f"profile-{number}")

    def _flood(self, engine: Engine) -> None:
        self._asked += 1
        ask(engine, tokens(20_000 + self._asked, CONTEXT - 16), None)

    def _note(self, tier: str, results: list[tuple[float, int]]) -> None:
        ttft_s = [seconds for seconds, _ in results]
        self.rows.append(
            {
                "from": tier,
                "ttft_ms": 1000 * statistics.median(ttft_s),
                "worst_ms": 1000 * max(ttft_s),
                "cached_tokens": min(cached for _, cached in results),
            }
        )


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--profiles", type=int, default=4, help="how many (default %(default)s)")
    options.add_argument("--hidden", type=int, default=256, help="width of the model (default %(default)s)")
    options.add_argument("--layers", type=int, default=4, help="its layers (default %(default)s)")
    args = options.parse_args()
    use_compilation_cache(ROOT / ".cache" / "jax")
    hub = PRESETS["v2"] | {
        "hidden_size": args.hidden, "num_hidden_layers": args.layers, "intermediate_size": 3 * args.hidden,
        "moe_intermediate_size": args.hidden // 2, "vocab_size": 4096, "kv_lora_rank": 128, "q_lora_rank": 128,
        "num_attention_heads": 4, "num_key_value_heads": 4,
    }  # fmt: skip
    model = Transformer(ModelConfig.from_hub(hub), rngs=nnx.Rngs(0))
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(model, args.profiles, directory)
        bench.run()
    cold, *hits = bench.rows
    ratios = {str(row["from"]): float(cold["ttft_ms"]) / float(row["ttft_ms"]) for row in hits}
    whole = all(row["cached_tokens"] >= PROFILE for row in hits)  # type: ignore[operator]
    parts = ", ".join(f"{tier} {ratio:.1f}x" for tier, ratio in ratios.items())
    figure = f"time to the first token, cold over hit, on {jax.default_backend()}: {parts} (floor {FLOOR:g}x)"
    return finish(bench.rows, figure, ok=whole and min(ratios.values()) >= FLOOR, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
