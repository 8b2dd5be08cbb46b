import numpy as np
import pytest

from model.config import ModelConfig
from model.gguf_names import tensor_names
from tests.model import tiny_gguf as tiny
from tests.model.shared import hub_config


@pytest.mark.parametrize("variant", ["llm_7b", "r1_distill_qwen", "llama_tied"])
def test_names_are_llama_cpps_and_rows_move_there_and_back(variant: str) -> None:
    config = ModelConfig.from_hub(hub_config(variant))
    attention = config.layers[0].attention
    rng = np.random.default_rng(0)
    for name in tensor_names(config):
        assert name.gguf == tiny.gguf_name(name.hub)
        array = rng.standard_normal(name.shape)
        np.testing.assert_array_equal(name.from_gguf(name.to_gguf(array)), array)
        heads = {"q_proj": attention.num_heads, "k_proj": attention.num_kv_heads}.get(name.hub.split(".")[-2])
        moves = heads is not None and config.model_type == "llama"
        np.testing.assert_array_equal(name.to_gguf(array), tiny.permute(array, heads) if moves else array)
