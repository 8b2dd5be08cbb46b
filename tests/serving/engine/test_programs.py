"""What compiling tells, and the pool that is sized by it."""

import pytest

from serving.batch import Bucket, Kind
from serving.config import EngineConfig
from serving.engine import runner as runner_module
from serving.engine.memory import is_tight
from serving.engine.programs import Programs
from serving.engine.runner import JaxRunner
from tests.fakes_model import tiny_model

CONFIG = EngineConfig(max_slots=64, page_size=4, max_context=64)
BUCKETS = [Bucket(Kind.SCORE, 1, 32, 0), Bucket(Kind.EXTEND, 1, 64, 16), Bucket(Kind.DECODE, 64, 1, 16)]


@pytest.mark.parametrize(
    ("asked", "wanted", "free", "tight"), [(0, 51, 100, True), (0, 50, 100, False), (9, 9, 1, False)]
)
def test_the_peak_is_measured_where_it_matters(asked: int, wanted: int, free: int, tight: bool) -> None:
    assert is_tight(asked, wanted, free) is tight


@pytest.mark.usefixtures("quick_compile")
def test_the_cache_takes_what_is_free_beside_the_peak_of_the_largest_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(3)
    programs = Programs(model, CONFIG, None)
    peak = max(programs.compile(bucket, 17).cost.temp_bytes for bucket in BUCKETS)
    assert peak > 64 * model.config.vocab_size * 4  # the logits of the largest decode step are part of it
    free = programs.table_bytes + peak + 100 * programs.page_bytes + 1
    monkeypatch.setattr(runner_module, "free_bytes", lambda _: free)
    runner = JaxRunner(model, CONFIG, max_context=64, buckets=BUCKETS)
    assert runner.num_pages == 100
    runner.close()
