from collections.abc import Iterator

import pytest

from tests.fakes import ToyModel
from tests.fakes_http import Served
from tests.fakes_text import EOS

COUNT = "count"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """Greedy answers to "count" are scripted; any other prompt gets the toy model's noise."""
    with Served(ToyModel(scripts={tuple(COUNT.encode()): [*b" 1 2 3", EOS]})) as served:
        yield served
