"""A killed training run goes on and ends with the same weights; the directory that it writes can be served."""

import csv
import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from model.load import load_model
from model.template import Template
from model.tokenizer import Tokenizer
from scripts.train_default import main
from tests.fakes_model import TINY_V3

TRAIN = Path(__file__).parents[2] / "data" / "credit_default" / "train.csv"


pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture
def common(tmp_path: Path) -> list[str]:
    """One small layer, and the first hundred rows."""
    sizes = {**TINY_V3, "num_hidden_layers": 1, "first_k_dense_replace": 0, "num_nextn_predict_layers": 0}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    with TRAIN.open(newline="") as source, (tmp_path / "train.csv").open("w", newline="") as target:
        csv.writer(target).writerows(row for row, _ in zip(csv.reader(source), range(101), strict=False))
    steps = ["--steps", "4", "--batch-rows", "8", "--save-every", "2", "--validation-rows", "30", "--json"]
    return ["--config", str(tmp_path / "config.json"), "--data", str(tmp_path), *steps]


def where(root: Path) -> list[str]:
    return ["--out", str(root / "out"), "--work", str(root / "work")]


def test_a_killed_run_ends_as_if_it_had_not_been(
    common: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert main([*common, *where(whole)]) == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert result["parameters"] > 20_000
    assert 0 <= result["validation_auc"] <= 1

    assert main([*common, *where(killed), "--stop-at", "3"]) == 0
    assert not (killed / "out" / "model.safetensors").exists()
    # The checkpoint is of step 2: step 3 is done again, with the same rows.
    assert main([*common, *where(killed)]) == 0
    assert not (killed / "work").exists()
    expected, got = (load_file(run / "out" / "model.safetensors") for run in (whole, killed))
    assert expected.keys() == got.keys()
    assert all((expected[name] == got[name]).all() for name in expected)

    template = Template.load(whole / "out" / "template.toml")
    assert template.threshold == pytest.approx(result["threshold"], rel=1e-3)
    assert load_model(whole / "out").config.vocab_size == Tokenizer.load(whole / "out").vocab_size


def test_all_rows_need_a_threshold(common: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*common, *where(tmp_path), "--all-rows"])
    assert "--threshold" in capsys.readouterr().err
