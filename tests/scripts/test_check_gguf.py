import builtins
import sys
from typing import Any

import numpy as np
import pytest

from scripts import check_gguf
from scripts.check_gguf import compare


def rows(*best: int) -> Any:
    logits = np.full((len(best), 8), -1.0, np.float32)
    logits[np.arange(len(best)), best] = 4.0
    return logits


def test_equal_logits_agree() -> None:
    assert compare(rows(1, 2, 3, 4), rows(1, 2, 3, 4), num_prompt=2) == (0.0, 3, 0.0)


def test_the_first_difference_is_measured_in_our_logits() -> None:
    theirs, ours = rows(1, 2, 3, 4), rows(1, 2, 3, 4)
    ours[2, 5] = 4.01  # just ahead of token 3
    found = compare(ours, theirs, num_prompt=2)
    assert found.agreed == 1
    assert found.lead == pytest.approx(0.01 / 4, rel=1e-3)
    assert found.relative_error == pytest.approx(5.01 / 4, rel=1e-3)


def test_a_difference_within_the_prompt_is_an_error_only() -> None:
    ours = rows(7, 2, 3)
    assert compare(ours, rows(1, 2, 3), num_prompt=2)[1:] == (2, 0.0)


def test_without_llama_cpp_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "llama_cpp":
            raise ImportError("no llama_cpp here")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    monkeypatch.setattr(sys, "argv", ["check_gguf", "m.gguf"])
    assert check_gguf.main() == 0
    assert capsys.readouterr().out.startswith("skipped: llama-cpp-python cannot be imported")
