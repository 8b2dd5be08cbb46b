"""A width is cut into parts that the Triton route can hold, which cover it, with as little padding as two can have."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels_pallas.tiles import MIN_SIZE, power_of_two, split

SPLITS = {1: [16], 16: [16], 24: [32], 48: [32, 16], 64: [64], 80: [64, 16], 112: [128], 128: [128], 192: [128, 64]}


@pytest.mark.parametrize("width", SPLITS)
def test_parts_of_the_widths_that_models_have(width):
    assert [part.size for part in split(width)] == SPLITS[width]


@given(st.integers(1, 1000))
def test_parts_are_powers_of_two_that_cover_the_width_once(width):
    parts = split(width)
    assert all(part.size == power_of_two(part.size) for part in parts)
    assert [part.start for part in parts] == [0, parts[0].size][: len(parts)]
    total = sum(part.size for part in parts)
    assert width <= total <= power_of_two(width)
    assert total - width < parts[-1].size or total == MIN_SIZE
