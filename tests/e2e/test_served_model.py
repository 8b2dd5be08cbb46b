"""What HTTP answers is what the full forward pass says: greedy text, log-probabilities, label probabilities."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from model.load import load_model
from model.template import Template
from serving.backend import Backend
from tests.fakes_http import Served

LONGEST = 96


class Reference:
    """log p(. | ids) in float64 from one full forward pass at a fixed shape, no cache, no buckets."""

    def __init__(self, directory: Path) -> None:
        model = load_model(directory)
        positions = jnp.arange(LONGEST)[None]

        @jax.jit
        def logits(tokens: jax.Array) -> jax.Array:
            return model.logits(model.hidden(tokens, positions))[0]

        self._logits = logits

    def logprobs(self, ids: list[int]) -> NDArray[np.float64]:
        """[len(ids), vocabulary]: row i is the distribution of token i + 1."""
        padded = np.zeros((1, LONGEST), np.int32)
        padded[0, : len(ids)] = ids
        wide = np.asarray(self._logits(padded))[: len(ids)].astype(np.float64)
        wide -= wide.max(-1, keepdims=True)
        return wide - np.log(np.exp(wide).sum(-1, keepdims=True))

    def greedy(self, ids: list[int], num_tokens: int) -> list[int]:
        ids = list(ids)
        for _ in range(num_tokens):
            ids.append(int(self.logprobs(ids)[-1].argmax()))
        return ids[-num_tokens:]

    def likelihood(self, ids: list[int], label: list[int]) -> float:
        table = self.logprobs(ids + label)
        return float(sum(table[len(ids) + i - 1, token] for i, token in enumerate(label)))


@pytest.fixture(scope="module")
def reference(tiny_directory: Path) -> Reference:
    return Reference(tiny_directory)


@pytest.mark.parametrize("length", [1, 7, 31, 32, 33, 64, 80])
def test_greedy_continuations_and_their_logprobs(tiny: Served, reference: Reference, length: int) -> None:
    prompt = [(7 * i + length) % 600 for i in range(length)]
    answer = tiny.complete(prompt, temperature=0, max_tokens=8, logprobs=1, echo=True, ignore_eos=True).json
    expected = prompt + reference.greedy(prompt, 8)
    table = reference.logprobs(expected)
    got = answer["choices"][0]["logprobs"]["token_logprobs"]
    assert got[0] is None
    want = [table[i - 1, token] for i, token in enumerate(expected) if i > 0]
    assert got[1:] == pytest.approx(want, abs=2e-4)


def test_label_probabilities_are_the_full_sequences(tiny: Served, reference: Reference, tiny_backend: Backend) -> None:
    tokenizer = tiny_backend.language.tokenizer
    labels = [" good", " bad", "of several tokens", " x y"]
    for text in ("a row", "word " * 6, "word " * 14):
        prompt = [tokenizer.bos_id, *tokenizer.encode(text)] if tokenizer.add_bos else tokenizer.encode(text)
        likelihoods = np.array([reference.likelihood(prompt, tokenizer.encode(label)) for label in labels])
        want = np.exp(likelihoods - likelihoods.max())
        result = tiny.post("/v1/score", {"inputs": [{"text": text}], "labels": labels}).json["results"][0]
        assert list(result["probabilities"].values()) == pytest.approx(list(want / want.sum()), abs=1e-4)


def test_features_are_scored_as_their_rendered_text(tiny: Served, tiny_directory: Path) -> None:
    template = Template.load(tiny_directory / "template.toml")
    features = {column: i * 1000 for i, column in enumerate(template.columns)}
    as_text = {column: str(value) for column, value in features.items()}
    inputs = [{"features": features}, {"features": {**as_text, "unused": None}}, {"text": template.render(features)}]
    first, second, third = tiny.post("/v1/score", {"inputs": inputs}).json["results"]
    assert first["probabilities"] == second["probabilities"] == third["probabilities"]
    assert set(first["probabilities"]) == {"good", "bad"}


def test_a_seeded_text_is_the_same_alone_and_in_company(tiny: Served) -> None:
    body = {"max_tokens": 12, "seed": 5, "temperature": 1.0, "ignore_eos": True}
    alone = tiny.complete("a row", **body).json["choices"][0]["text"]
    assert tiny.complete(["other", "a row", "third"], **body).json["choices"][1]["text"] == alone
