"""The same row gets the same score over HTTP and through `tidegate score`."""

import csv
import io
import itertools
import time
from pathlib import Path

import pytest

from serving.config import Config
from serving.loading import load_backend
from serving.offline.score import score_file
from tests.compiling import few_optimisations
from tests.fakes_http import Served

ROWS = Path(__file__).resolve().parents[2] / "data" / "credit_default" / "test.csv"


def test_online_and_offline_agree(
    tiny: Served, tiny_directory: Path, tiny_config: Config, programs: Path, tmp_path: Path
) -> None:
    with ROWS.open(newline="") as file:
        rows = list(itertools.islice(csv.DictReader(file), 10))
    rows[3] = {**rows[3], "age": "x"}
    source, out = tmp_path / "rows.csv", tmp_path / "scored.csv"
    with source.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    backend = load_backend(tiny_config, tiny_directory, compile_cache=programs, clock=time.monotonic)
    messages = io.StringIO()
    with few_optimisations():
        code = score_file(source, out, language=backend.language, engine=backend.engine, messages=messages)
    assert code == 0
    online = tiny.post("/v1/score", {"inputs": [{"features": row} for row in rows]}).json["results"]
    with out.open(newline="") as file:
        offline = list(csv.DictReader(file))
    assert len(offline) == len(online) == 10
    for row, result in zip(offline, online, strict=True):
        if "error" in result:
            assert "age" in row["error"]
            continue
        assert row["label"] == result["label"]
        for label, probability in result["probabilities"].items():
            assert float(row[f"prob_{label}"]) == pytest.approx(probability, abs=1e-6)
    assert ["error" in result for result in online].index(True) == 3
