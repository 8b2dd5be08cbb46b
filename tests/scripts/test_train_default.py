"""A killed training run goes on and ends with the same weights; the directory that it writes is served."""

import json
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from safetensors.numpy import load_file

from model.load import load_model
from model.template import Template
from model.tokenizer import Tokenizer
from scripts.train_default import main
from tests.fakes_model import TINY_V3


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_text(json.dumps(TINY_V3))
    return path


@pytest.fixture(autouse=True)
def compile_cache(tmp_path: Path) -> Iterator[None]:
    """The three runs of a test compile the same programs: once is enough."""
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    yield
    jax.config.update("jax_compilation_cache_dir", before[0])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before[1])


def arguments(config: Path, root: Path, *more: str) -> list[str]:
    sizes = ["--steps", "4", "--batch-rows", "8", "--save-every", "2", "--json"]
    where = ["--config", str(config), "--out", str(root / "out"), "--work", str(root / "work")]
    return [*sizes, *where, *more]


def test_a_killed_run_ends_as_if_it_had_not_been(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert main(arguments(config, whole)) == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert result["parameters"] > 50_000
    assert 0 <= result["validation_auc"] <= 1

    assert main(arguments(config, killed, "--stop-at", "3")) == 0
    assert not (killed / "out" / "model.safetensors").exists()
    with pytest.raises(SystemExit, match="other seed"):
        main(arguments(config, killed, "--seed", "7"))
    # The checkpoint is of step 2: step 3 is done again, with the same rows.
    assert main(arguments(config, killed)) == 0
    assert not (killed / "work").exists()
    expected, got = (load_file(run / "out" / "model.safetensors") for run in (whole, killed))
    assert expected.keys() == got.keys()
    assert all((expected[name] == got[name]).all() for name in expected)

    template = Template.load(whole / "out" / "template.toml")
    assert template.threshold == pytest.approx(result["threshold"], rel=1e-3)
    assert load_model(whole / "out").config.vocab_size == Tokenizer.load(whole / "out").vocab_size


def test_all_rows_need_a_threshold(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments(config, tmp_path, "--all-rows"))
    assert "--threshold" in capsys.readouterr().err
