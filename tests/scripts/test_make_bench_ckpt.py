from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from model.load import load_model
from model.tokenizer import Tokenizer
from scripts import make_bench_ckpt
from scripts.make_bench_ckpt import VOCABULARY, write_checkpoint

SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip


@pytest.mark.parametrize("preset", ["v2", "llama"])
def test_a_checkpoint_loads_and_repeats_itself(tmp_path: Path, preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(make_bench_ckpt.PRESETS, preset, make_bench_ckpt.PRESETS[preset] | SMALL)
    count = write_checkpoint(tmp_path / "a", preset, layers=2)
    write_checkpoint(tmp_path / "b", preset, layers=2)
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert sum(array.size for array in first.values()) == count
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name])
        if array.ndim > 1:
            assert abs(float(array.std()) - make_bench_ckpt.STD) < 0.005
    assert load_model(tmp_path / "a").config.num_layers == 2
    tokenizer = Tokenizer.load(tmp_path / "a")
    assert tokenizer.vocab_size == VOCABULARY
    assert tokenizer.decode(tokenizer.encode("hello wide world")) == "hello wide world"
    assert all(tokenizer.token_bytes(token) for token in range(5, VOCABULARY))
