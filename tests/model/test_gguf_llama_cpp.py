"""llama.cpp itself reads what we write, and computes what the published models compute; skipped where it is absent."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model import convert
from model.config import ModelConfig
from model.expected import read_expected
from model.gguf_splits import CUTS
from model.tokenizer import Tokenizer
from tests.model import tiny_gguf as tiny
from tests.model.shared import GOLDEN

llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed: it is compiled at installation")

TEXTS = (
    "the the 1999", "Hello, world! It's 12:30 o'clock; we'LL see   2024\n\n  x\t",
    "naïve café — 你好，世界123 かな 한국 Привет",
    "def f(x):\n    return x_1 + $y ~ ^2 | `z`...\r\n", "👍🏽 ½ ² a\u0301b \u00a0 end  ", "in  the\n\nthe", "'s 't 'RE",
)  # fmt: skip


def open_llama(path: Path, **options: Any) -> Iterator[Any]:
    llama = llama_cpp.Llama(str(path), n_ctx=128, n_threads=1, verbose=False, **options)
    yield llama
    llama.close()


@pytest.mark.parametrize(
    "variant", ["llm_7b", "coder_linear_rope", "llama_tied", "r1_distill_llama", "r1_distill_qwen"]
)
def test_logits_are_the_references(tmp_path: Path, variant: str) -> None:
    convert.run(GOLDEN / variant, tmp_path / "m.gguf", to="gguf")
    expected = read_expected(GOLDEN / variant / "expected.npz", ModelConfig.load(GOLDEN / variant).vocab_size)
    float32 = {"type_k": 0, "type_v": 0, "flash_attn": False, "logits_all": True}
    for llama in open_llama(tmp_path / "m.gguf", **float32):
        for ids, length, logits in zip(*(expected[k] for k in ("input_ids", "lengths", "logits")), strict=True):
            llama.reset()
            llama.eval(ids[:length].tolist())
            got, want = np.array(llama.scores[:length]), logits[:length]
            assert np.abs(got - want).max() <= 1e-3 * np.abs(want).max()


@pytest.mark.parametrize("pre", CUTS)
def test_ids_are_llama_cpps(tmp_path: Path, pre: str) -> None:
    path = tiny.write(tmp_path / "m.gguf", tiny.hub_tensors(), tiny.metadata() | {"tokenizer.ggml.pre": pre})
    convert.run(path, tmp_path / "m")
    tokenizer = Tokenizer.load(tmp_path / "m")
    for llama in open_llama(path, vocab_only=True):
        for text in TEXTS:
            if pre == "deepseek-llm" and "19" in text:
                continue  # llama.cpp does not cut digits here; DeepSeek's own file does, and no vocabulary joins them
            assert tokenizer.encode(text) == llama.tokenize(text.encode(), add_bos=False, special=False), text
        marked = "<|im_start|>user\nthe tool call<|im_end|>\n"
        assert tokenizer.encode_trusted(marked) == llama.tokenize(marked.encode(), add_bos=False, special=True)


@pytest.mark.parametrize("key", ["v2", "r1"])
def test_deepseeks_tokenizers_give_llama_cpp_the_same_ids(deepseek_files, golden_json, key, tmp_path):
    import gguf

    from model.gguf_vocabulary import gguf_vocabulary
    from model.gguf_write import _add_metadata
    from tests.model.shared import hub_config

    directory = deepseek_files(key)
    tokenizer = Tokenizer.load(directory)
    config = ModelConfig.from_hub(hub_config("llama_tied", vocab_size=tokenizer.vocab_size))
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    _add_metadata(writer, tiny.metadata() | gguf_vocabulary(directory, config)[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    texts = [case["text"] for case in golden_json("tokenizer_cases.json")["cases"] if isinstance(case.get("text"), str)]
    for llama in open_llama(tmp_path / "m.gguf", vocab_only=True):
        different = [
            t for t in texts if tokenizer.encode(t) != llama.tokenize(t.encode(), add_bos=False, special=False)
        ]
        assert different == []
