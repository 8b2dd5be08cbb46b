"""`tidegate check` on the goldens: this build reproduces every published generation before V3.2."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from model.check import TOLERANCE, check_one, run
from model.expected import read_expected
from tests.compiling import few_optimisations
from tests.model.shared import GOLDEN, VARIANTS

OPTIMISED = ("v3", "r1_distill_llama")  # one of each attention in programs as they are shipped


@pytest.mark.parametrize("variant", VARIANTS)
def test_golden(variant):
    with nullcontext() if variant in OPTIMISED else few_optimisations():
        result = check_one(GOLDEN / variant, None)
    assert result.status == "ok", result.error
    assert result.greedy_equal
    for name, error in result.max_err.items():
        assert error is None or error <= TOLERANCE[name]
    assert (result.max_err["mtp_logits"] is not None) == (variant == "v3")


@pytest.mark.parametrize("variant", ["r1_distill_qwen", "v2_lite"])
def test_kernels_reproduce_the_goldens(variant):
    with few_optimisations():
        result = check_one(GOLDEN / variant, None, "interpret")
    assert (result.status, result.greedy_equal) == ("ok", True), result.error


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    shutil.copytree(GOLDEN / "llm_7b", tmp_path / "llama")
    return tmp_path / "llama"


def change_expected(directory: Path, name: str) -> None:
    arrays = dict(np.load(directory / "expected.npz"))
    arrays[name] = arrays[name].copy()
    arrays[name].flat[1] += 1
    np.savez(directory / "expected.npz", **arrays)


@pytest.mark.parametrize("name", ["logits", "logprobs", "greedy"])
def test_a_wrong_number_is_found(llama, name):
    change_expected(llama, name)
    with few_optimisations():
        result = check_one(llama, None)
    assert result.status == "wrong"
    assert name in result.error


def test_json_report_and_exit_codes(llama, capsys):
    (llama / "model.safetensors").write_bytes(b"short")
    assert run([GOLDEN / "v32"], as_json=True) == 3
    rows = json.loads(capsys.readouterr().out)
    assert rows[0]["status"] == "unsupported"
    assert "deepseek_v32" in rows[0]["error"]
    assert run([GOLDEN / "v4", llama, llama / "nowhere"], as_json=True) == 1
    rows = json.loads(capsys.readouterr().out)
    assert [row["status"] for row in rows] == ["unsupported", "wrong", "wrong"]
    assert set(rows[0]) == {"variant", "status", "max_err", "greedy_equal", "error"}
    assert set(rows[0]["max_err"]) == {"logits", "logprobs", "mtp_logits"}


@pytest.mark.parametrize(
    ("raw", "word"),
    [
        (b"", "not a readable npz"),
        (b"PK\x03\x04 and no more", "not a readable npz"),
        ({"lengths": np.array([1, 99, 1])}, "lengths must be"),
        ({"input_ids": np.full((3, 48), 999)}, "input_ids must be"),
        ({"input_ids": np.zeros((0, 0), np.int32)}, "not empty"),
        ({"logits": np.zeros((2, 2), np.float32)}, r"logits is \[2, 2\]"),
        ({"lengths": np.array([None, {}, 1], object)}, "not a readable npz"),
    ],
)
def test_a_broken_expected_file_is_one_line(llama, raw, word):
    path = llama / "expected.npz"
    if isinstance(raw, bytes):
        path.write_bytes(raw)
    else:
        np.savez(path, **(dict(np.load(path)) | raw))
    with pytest.raises(ValueError, match=word):
        read_expected(path, 256)
