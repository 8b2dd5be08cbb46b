from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.config import ModelConfig, UnsupportedModel
from model.gguf_file import GgufFile, open_gguf
from model.gguf_metadata import gguf_keys, hub_config
from tests.model import shared
from tests.model import tiny_gguf as tiny


def file_of(tmp_path: Path, changes: dict[str, Any] | None = None, **options: Any) -> GgufFile:
    keys = tiny.metadata() | (changes or {})
    return open_gguf(tiny.write(tmp_path / "m.gguf", tiny.hub_tensors(), keys, **options))[0]


@pytest.mark.parametrize("variant", ["llm_7b", "coder_linear_rope", "llama_tied", "r1_distill_qwen"])
def test_keys_are_the_configs_and_come_back(tmp_path: Path, variant: str) -> None:
    config = ModelConfig.from_hub(shared.hub_config(variant))
    keys, divisors = gguf_keys(config)
    assert divisors is None
    file = GgufFile(tmp_path, {"general.architecture": config.model_type, **keys}, {})
    hub, problems = hub_config(file)
    assert problems == []
    for field in ("hidden_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps", "max_position_embeddings"):
        assert hub[field] == shared.hub_config(variant)[field], field


def test_lengths_other_than_a_heads_are_refused(tmp_path: Path) -> None:
    changes = {"llama.attention.value_length": 8, "llama.rope.dimension_count": 12}
    _, problems = hub_config(file_of(tmp_path, changes))
    assert [problem.split()[1] for problem in problems] == [
        "llama.attention.value_length",
        "llama.rope.dimension_count",
    ]


def test_rope_divisors_of_no_rule_are_a_problem(tmp_path: Path) -> None:
    file = file_of(tmp_path, extra={"rope_freqs.weight": np.linspace(1, 9, 8, dtype=np.float32)})
    assert hub_config(file)[1] == ["rope_freqs.weight follows no known rule (llama3 with factors 1 and 4)"]


def test_what_ggufs_of_these_architectures_cannot_say_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="'deepseek_v3' cannot be written"):
        gguf_keys(ModelConfig.from_hub(shared.hub_config("v3")))
    scaled = shared.hub_config("r1_distill_qwen", rope_scaling=shared.hub_config("r1_distill_llama")["rope_scaling"])
    with pytest.raises(UnsupportedModel, match="llama3 has no form in a GGUF of qwen2"):
        gguf_keys(ModelConfig.from_hub(scaled))
