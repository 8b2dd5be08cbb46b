"""Case A16: the same body and seed give the same text, alone, among 31 other requests, and after a restart."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from serving.config import Config
from serving.loading import load_backend
from tests.compiling import few_optimisations
from tests.fakes_http import Served

SEEDS = (123, 0, -1, -(2**63), 2**63, 2**64 - 1)


def text(server: Served, seed: int, prompt: object = "a row") -> str:
    answer = server.complete(prompt, max_tokens=12, temperature=1.0, seed=seed, ignore_eos=True)
    assert answer.status == 200, answer.body
    return str(answer.json["choices"][0]["text"])


@pytest.fixture(scope="module")
def restarted(tiny_config: Config, tiny_directory: Path, programs: Path) -> Iterator[Served]:
    backend = load_backend(tiny_config, tiny_directory, compile_cache=programs, clock=time.monotonic)
    config = tiny_config.engine
    server = Served(language=backend.language, runner=backend.engine._runner, engine_config=config)
    with ExitStack() as stack:
        with few_optimisations():
            stack.enter_context(server)
        yield server


def test_alone_and_among_31_others(embedded: Served) -> None:
    alone = [text(embedded, seed) for seed in SEEDS]
    assert len(set(alone)) == len({seed % 2**64 for seed in SEEDS})  # those are the seeds that differ in 64 bits
    noise = [(1000 + i, [5 + i] * (1 + i % 40)) for i in range(31)]
    for seed, want in zip(SEEDS, alone, strict=True):
        with ThreadPoolExecutor(32) as clients:
            others = [clients.submit(text, embedded, *each) for each in noise]
            assert clients.submit(text, embedded, seed).result() == want
            assert all(other.result() for other in others)


def test_after_a_restart(tiny: Served, restarted: Served) -> None:
    assert [text(tiny, seed) for seed in SEEDS] == [text(restarted, seed) for seed in SEEDS]


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1])
def test_more_than_64_bits_are_refused(tiny: Served, seed: int) -> None:
    answer = tiny.complete("a row", seed=seed)
    assert (answer.status, answer.error["param"]) == (400, "seed")
