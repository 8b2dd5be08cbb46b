"""What a row brings to every step is in its slot, and gone when the slot is given back."""

import numpy as np
import pytest

from serving.engine.sequence import Sequence, make_sequences
from serving.engine.slots import Slots
from serving.types import Job, Prepared, SamplingParams
from tests.fakes_constraint import Slotted

ARRAYS = ("page_table", "num_pages", "position", "temperature", "top_k", "top_p", "min_p", "seed", "want_top", "table")
ARRAYS += ("repetition_penalty", "presence_penalty", "frequency_penalty")


def row(**params: object) -> Sequence:
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    return make_sequences(None, Job("j", "t", (Prepared((1, 2, 3), sampling),)))[0]


def contents(slots: Slots) -> dict[str, list[object]]:
    return {name: getattr(slots, name).tolist() for name in ARRAYS}


def test_a_slot_holds_its_row_and_nothing_after_it() -> None:
    slots = Slots(3, 4)
    empty = contents(slots)
    asked = row(
        temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, seed=2**40 + 5, top_logprobs=3,
        repetition_penalty=1.5, presence_penalty=0.25, frequency_penalty=-0.75,
    )  # fmt: skip
    slot = slots.assign(asked, [9, 8])
    assert slots.page_table[slot].tolist() == [9, 8, 0, 0]
    assert (slots.position[slot], slots.num_pages[slot], slots.table[slot]) == (3, 2, slot)
    assert (slots.temperature[slot], slots.top_k[slot], slots.want_top[slot]) == (0.5, 7, True)
    assert slots.top_p[slot] == np.float32(0.9)
    assert slots.min_p[slot] == np.float32(0.1)
    assert slots.seed[slot].tolist() == [5, 2**8]
    penalties = (slots.repetition_penalty[slot], slots.presence_penalty[slot], slots.frequency_penalty[slot])
    assert penalties == (1.5, 0.25, -0.75)
    assert slots.free == 2
    slots.release(slot)
    assert contents(slots) == empty
    assert slots.free == 3


@pytest.mark.parametrize(
    ("params", "adjusts"),
    [
        ({}, False),
        ({"temperature": 0.0, "top_k": 5, "seed": -3, "top_logprobs": 2}, False),
        ({"repetition_penalty": 0.9}, True),
        ({"presence_penalty": -0.1}, True),
        ({"frequency_penalty": 0.1}, True),
        ({"logit_bias": ((5, 1.0),)}, True),
        ({"allowed_token_ids": (5,)}, True),
        ({"constraint": Slotted([[5]])}, True),
    ],
)
def test_only_rows_that_adjust_their_logits_have_a_table(params: dict[str, object], adjusts: bool) -> None:
    slots = Slots(2, 1)
    slot = slots.assign(row(**params), [1])
    assert slots.table[slot] == (slot if adjusts else 0)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63, -(2**63), 2**64 - 1])
def test_seeds_of_64_bits_signed_or_not(seed: int) -> None:
    slots = Slots(1, 1)
    low, high = slots.seed[slots.assign(row(seed=seed), [1])].tolist()
    assert low + (high << 32) == seed % 2**64


def test_a_slot_is_given_back_once() -> None:
    slots = Slots(1, 1)
    slot = slots.assign(row(), [1])
    slots.release(slot)
    for wrong in (slot, 0):
        with pytest.raises(AssertionError):
            slots.release(wrong)
