from dataclasses import dataclass
from typing import Any

import pytest

from serving.errors import InternalError, NotReady
from serving.startup import Phase, Startup


@dataclass
class FakeEngine:
    ready: bool = False
    progress: tuple[int, int] = (2, 5)
    failure: Exception | None = None


@dataclass
class FakeService:
    engine: FakeEngine


def test_phases_come_in_order() -> None:
    startup, engine = Startup(), FakeEngine()
    assert startup.health.phase is Phase.LOADING
    with pytest.raises(NotReady) as caught:
        startup.service()
    assert caught.value.retry_after_s
    service: Any = FakeService(engine)
    startup.loaded(service)
    assert startup.service() is service
    assert (startup.health.phase, startup.health.done, startup.health.total) == (Phase.WARMING, 2, 5)
    engine.ready = True
    assert startup.health.phase is Phase.READY
    engine.failure = RuntimeError()
    assert startup.health.phase is Phase.FAILED


def test_a_failed_load_is_final() -> None:
    startup = Startup()
    startup.failed()
    assert startup.health.phase is Phase.FAILED
    with pytest.raises(InternalError):
        startup.service()


def test_a_server_that_stops_takes_no_new_work() -> None:
    startup, service = Startup(), FakeService(FakeEngine(ready=True))
    startup.loaded(service)  # type: ignore[arg-type]
    startup.stopping()
    assert startup.health.phase is Phase.STOPPING
    with pytest.raises(NotReady, match="stopping") as caught:
        startup.service()
    assert caught.value.retry_after_s
