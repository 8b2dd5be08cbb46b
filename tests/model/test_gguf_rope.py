"""Rotary scaling there and back; llama3's rule from its divisors."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from model.architecture import RopeConfig
from model.config import UnsupportedModel
from model.gguf_fields import GgufFields
from model.gguf_rope import llama3_scaling, read_scaling, write_scaling
from model.hub_fields import HubFields
from model.hub_rope import read_rope

PLAIN = RopeConfig(64, 500000.0, False)


def back(rope: RopeConfig, context: int = 4096) -> RopeConfig:
    """Through GGUF's form and the hub's to ours again."""
    keys, divisors = write_scaling(rope)
    fields = GgufFields({f"llama.{key}": value for key, value in keys.items()}, "llama")
    scaling = read_scaling(fields) if divisors is None else llama3_scaling(divisors, rope.theta)
    assert fields.problems + fields.rest(()) == []
    hub = {"rope_theta": rope.theta, "rope_scaling": scaling, "max_position_embeddings": context}
    return read_rope(HubFields(hub), rope.dim, interleaved=False)


@pytest.mark.parametrize(
    "rope",
    [
        PLAIN,
        dataclasses.replace(PLAIN, kind="linear", factor=4.0, original_max_position=4096),
        dataclasses.replace(PLAIN, kind="yarn", factor=32.0, original_max_position=8192, beta_fast=16.0),
        dataclasses.replace(PLAIN, kind="llama3", factor=8.0, original_max_position=8192),
        dataclasses.replace(PLAIN, kind="llama3", factor=32.0, original_max_position=8192),
        dataclasses.replace(PLAIN, dim=16, kind="llama3", factor=8.0, original_max_position=64),
        dataclasses.replace(PLAIN, dim=128, theta=1e4, kind="llama3", factor=2.5, original_max_position=12345),
    ],
    ids=lambda rope: f"{rope.kind}-{rope.factor}-{rope.original_max_position}",
)
def test_there_and_back(rope: RopeConfig) -> None:
    assert back(rope) == rope


def test_metas_own_divisors_are_recognised() -> None:
    """Computed as llama.cpp's converter does, from the values of Llama 3.1."""
    divisors = []
    for wave in 2 * np.pi * 500000.0 ** (np.arange(0, 128, 2) / 128):
        if wave < 8192 / 4:
            divisors.append(1.0)
        elif wave > 8192:
            divisors.append(8.0)
        else:
            smooth = (8192 / wave - 1) / (4 - 1)
            divisors.append(1 / ((1 - smooth) / 8 + smooth))
    found = llama3_scaling(np.array(divisors, np.float32), 500000.0)
    assert found == {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192}  # fmt: skip


@pytest.mark.parametrize(
    "divisors", [[1.0, 1.0], [1.0, 2.0, 3.0, 9.0], [8.0, 1.0, 1.0, 1.0], [np.nan, 1.0], [-1.0, 8.0], [0.0, 8.0]]
)
def test_divisors_of_no_known_rule_are_refused(divisors: list[float]) -> None:
    assert llama3_scaling(np.array(divisors, np.float32), 10000.0) is None


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"rope.scaling.type": "longrope"}, "known: none, linear, yarn"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 0.5}, "only 1"),
        ({"rope.scaling.factor": "x"}, "a finite number"),
    ],
)
def test_what_is_not_known_is_a_problem(keys: dict[str, Any], said: str) -> None:
    fields = GgufFields({f"llama.{key}": value for key, value in keys.items()}, "llama")
    read_scaling(fields)
    assert len(fields.problems) == 1
    assert said in fields.problems[0]


def test_old_files_scale_linearly_under_another_key() -> None:
    fields = GgufFields({"llama.rope.scale_linear": 4.0}, "llama")
    assert read_scaling(fields) == {"rope_type": "linear", "factor": 4.0}


def test_yarn_with_its_own_attention_factor_has_no_form_there() -> None:
    rope = dataclasses.replace(PLAIN, kind="yarn", factor=4.0, original_max_position=4096, attention_factor=1.0)
    with pytest.raises(UnsupportedModel, match="attention factor"):
        write_scaling(rope)
