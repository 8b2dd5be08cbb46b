"""Pages between device and host with the real programs: bytes survive, and so do the tokens of a model."""

from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from serving.batch import Bucket, Kind
from serving.config import EngineConfig
from serving.engine.buckets import BucketSet
from serving.engine.host_tier import HostTier
from serving.engine.kv_pool import KvPool
from serving.engine.kv_tiers import KvTiers
from serving.engine.loop import Loop
from serving.engine.page_copies import PageCopies
from serving.engine.profile_disk import ProfileDisk
from serving.engine.profiles import Profiles
from serving.engine.runner import JaxRunner
from serving.engine.scheduler import Events, Scheduler
from serving.engine.sequence import Sequence, make_sequences
from serving.engine.stats import EngineStats
from serving.types import Job, Prepared, SamplingParams
from tests.fakes import FakeClock
from tests.fakes_model import tiny_model

CONFIG = EngineConfig(max_slots=2, page_size=4, num_pages=14, max_context=40, prefill_chunk=16)
BUCKETS = [
    Bucket(Kind.SCORE, 1, 40, 0),
    Bucket(Kind.EXTEND, 1, 16, 10),
    Bucket(Kind.DECODE, 2, 1, 10),
]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_pages_come_back_to_the_bit_and_others_stay(dtype: jnp.dtype) -> None:
    shapes = [(20, 2, 4, 3), (20, 1, 4, 5)]
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape).astype(dtype) for shape in shapes]
    copies = PageCopies(tuple(jnp.asarray(a) for a in arrays), None)
    pages = [7, 3, 19]
    content = copies.read(tuple(jnp.asarray(a) for a in arrays), pages).result()
    wanted = np.concatenate([a[pages].reshape(3, -1) for a in arrays], axis=1)
    assert content.shape == (3, 44 * wanted.dtype.itemsize)
    assert content.tobytes() == wanted.tobytes()
    written = copies.write(tuple(jnp.zeros(shape, dtype) for shape in shapes), [1, 2, 5], content)
    for after, before in zip(map(np.asarray, written), arrays, strict=True):
        assert (after[[1, 2, 5]] == before[pages]).all()
        assert not np.delete(after, [1, 2, 5], axis=0).any()


class Driven:
    """A loop with tiers around one warm runner, turned by hand."""

    def __init__(self, runner: JaxRunner, directory: Path) -> None:
        disk = ProfileDisk(directory, "tiny", runner.page_bytes, lambda work: work())
        self.tiers = KvTiers(HostTier(1 << 20), Profiles(runner.page_bytes, 1 << 20), disk, page_size=4)
        pool = KvPool(runner.num_pages, CONFIG.page_size)
        self.scheduler = Scheduler(CONFIG, BucketSet(runner.buckets), pool, 40, tiers=self.tiers)
        self.loop = Loop(runner, self.scheduler, self._record, clock=FakeClock(), stats=EngineStats())
        self.answers: dict[Sequence, list[int]] = {}

    def _record(self, events: Events) -> None:
        for row, update in events:
            assert update.error is None
            self.answers.setdefault(row, []).extend(token.token_id for token in update.tokens)

    def ask(self, prompt: tuple[int, ...], profile: str | None = None) -> tuple[list[int], int]:
        """Tokens, and how many of the prompt were cached."""
        sampling = SamplingParams(max_tokens=6, temperature=0.0)
        (row,) = make_sequences(self, Job("job", "t", (Prepared(prompt, sampling),), profile_id=profile))
        self.scheduler.check(row)
        self.scheduler.submit(row, 0.0)
        while not self.loop.idle:
            self.loop.turn()
        return self.answers[row], row.num_cached


@pytest.fixture(scope="module")
def runner(quick_compile: None) -> Iterator[JaxRunner]:
    runner = JaxRunner(tiny_model(3), CONFIG, max_context=40, buckets=BUCKETS)
    runner.warmup(lambda done, total: None)
    yield runner
    runner.close()


def prompt(number: int, length: int = 30) -> tuple[int, ...]:
    return tuple(int(t) for t in np.random.default_rng(number).integers(1, 60, length))


def test_the_tokens_are_the_same_from_device_host_and_disk(runner: JaxRunner, tmp_path: Path) -> None:
    compiles = runner.num_compiles
    assert runner.page_copy_s > 0
    first = Driven(runner, tmp_path)
    cold, cached = first.ask(prompt(1), "me")
    assert cached == 0
    assert first.ask(prompt(1)) == (cold, 28)
    first.ask(prompt(2))
    first.ask(prompt(3))
    assert first.tiers.num_host_tokens == 0
    assert first.ask(prompt(1)) == (cold, 28)
    assert first.tiers.num_host_tokens >= 16  # the others were still on the device
    runner.reset()
    second = Driven(runner, tmp_path)
    assert second.ask(prompt(1), "me") == (cold, 28)
    assert second.tiers.num_disk_tokens == 28
    assert runner.num_compiles == compiles
