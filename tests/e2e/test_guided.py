"""Guided output of a real model behind HTTP: right texts, nothing compiled, other requests untouched."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.fakes_http import Served

pytest.importorskip("llguidance", reason="guided output is the extra tidegate[guided]")

SCHEMA = {
    "type": "object",
    "properties": {"risk": {"enum": ["low", "high"]}, "score": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["risk", "score"],
    "additionalProperties": False,
}


def test_schemas_expressions_and_choices(tiny: Served) -> None:
    before = tiny.metric("tidegate_jit_compiles_total")
    free = tiny.complete("a row", max_tokens=12, seed=5, ignore_eos=True).json

    def one(i: int) -> bool:
        """Whether a whole guided text came."""
        fields = {"max_tokens": 80, "seed": i, "temperature": 1.0 if i % 2 else 0}
        if i % 4 == 0:
            assert tiny.complete("a row", max_tokens=12, seed=5, ignore_eos=True).json["choices"] == free["choices"]
            return False
        forms = ({"guided_json": SCHEMA}, {"guided_regex": "[a-f]{4}-[0-9]{2}"}, {"guided_choice": ["good", "no idea"]})
        choice = tiny.complete("a row", **fields, **forms[i % 3]).json["choices"][0]
        if choice["finish_reason"] == "length":  # white space may use it up
            return False
        if i % 3 == 0:
            value = json.loads(choice["text"])
            assert value["risk"] in ("low", "high")
            assert value["score"] in range(100)
        elif i % 3 == 1:
            assert re.fullmatch("[a-f]{4}-[0-9]{2}", choice["text"])
        else:
            assert choice["text"] in ("good", "no idea")
        return True

    with ThreadPoolExecutor(6) as clients:
        assert sum(clients.map(one, range(36))) > 12
    assert tiny.metric("tidegate_jit_compiles_total") == before
    assert tiny.metric("tidegate_engine_failed_steps_total") == 0
