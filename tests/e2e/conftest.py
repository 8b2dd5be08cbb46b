"""A small random model in hub form, and a real server over it: the whole path, only its size is not real."""

import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import jax.numpy as jnp
import pytest

from model.checkpoint import save_hub
from model.tokenizer import Tokenizer
from serving.backend import Backend
from serving.config import Config, EngineConfig, ModelSection
from serving.loading import load_backend
from tests.compiling import few_optimisations
from tests.fakes_http import Served
from tests.fakes_model import TINY_V3, tiny_model

ROOT = Path(__file__).resolve().parents[2]
ZOO = ROOT / "model" / "zoo" / "credit-mini"
ENGINE = EngineConfig(  # few and small buckets, a row of each kind needs several
    max_context=96,
    max_slots=2,
    page_size=8,
    num_pages=40,
    hard_size=4,
    soft_size=2,
    max_score_rows=4,
    max_score_tokens=64,
    score_batch_tokens=128,
    prefill_chunk=32,
    prefill_batch_tokens=64,
)


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights with the embedded model's tokenizer and template."""
    directory = tmp_path_factory.mktemp("tiny")
    for name in ("tokenizer.json", "tokenizer_config.json", "template.toml"):
        shutil.copy(ZOO / name, directory / name)
    vocab_size = Tokenizer.load(directory).vocab_size
    hub = {**TINY_V3, "vocab_size": vocab_size, "max_position_embeddings": 128}
    model = tiny_model(vocab_size=vocab_size, max_position_embeddings=128)
    save_hub(model, hub, directory, dtype=jnp.dtype(jnp.float32))
    return directory


@pytest.fixture(scope="session")
def tiny_config() -> Config:
    return Config(model=ModelSection(path="tiny"), engine=ENGINE)


@pytest.fixture(scope="session")
def programs() -> Path:
    """Where all tests keep compiled programs: a second backend, and a second run, start fast."""
    return ROOT / ".cache" / "jax"


@pytest.fixture(scope="session")
def tiny_backend(tiny_directory: Path, tiny_config: Config, programs: Path) -> Backend:
    return load_backend(tiny_config, tiny_directory, compile_cache=programs, clock=time.monotonic)


@pytest.fixture(scope="session")
def tiny(tiny_backend: Backend) -> Iterator[Served]:
    """The backend's runner and language behind HTTP; ready."""
    runner = tiny_backend.engine._runner
    server = Served(
        language=tiny_backend.language,
        runner=runner,
        engine_config=ENGINE,
        num_compiles=tiny_backend.num_compiles,
        name="tiny",
    )
    with ExitStack() as stack:
        with few_optimisations():
            stack.enter_context(server)
        yield server


@pytest.fixture(scope="session")
def embedded(programs: Path) -> Iterator[Served]:
    """The embedded model as `tidegate serve` serves it."""
    backend = load_backend(Config(), ZOO, compile_cache=programs, clock=time.monotonic)
    server = Served(
        language=backend.language,
        runner=backend.engine._runner,
        num_compiles=backend.num_compiles,
        name="credit-mini",
    )
    with server:
        yield server
