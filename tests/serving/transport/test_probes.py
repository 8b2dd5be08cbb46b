"""Also case A24: an open port before the model is ready."""

import threading

from serving.batch import Progress
from serving.errors import NotReady
from serving.startup import Startup
from tests.fakes import FakeRunner
from tests.fakes_http import Served


class SlowRunner(FakeRunner):
    """Warms up as far as the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def warmup(self, progress: Progress) -> None:
        progress(7, len(self.buckets))
        self.reached.set()
        assert self.go_on.wait(30)
        super().warmup(progress)


def test_a24_the_port_is_open_while_the_model_warms_up() -> None:
    runner = SlowRunner()
    with Served(runner=runner, start=False) as server:
        server.engine.start()
        assert runner.reached.wait(30)
        assert server.get("/livez").status == 200
        ready = server.get("/readyz")
        assert (ready.status, ready.json) == (503, {"status": "warming", "buckets": f"7/{len(runner.buckets)}"})
        for answer in (
            server.complete("a"),
            server.complete("a", stream=True),
            server.chat("a"),
            server.post("/v1/score", {"inputs": [{"text": "a"}]}),
        ):
            assert (answer.status, answer.error["code"]) == (503, "not_ready")
            assert int(answer.headers["retry-after"]) >= 1
        assert server.get("/v1/models").status == 200
        runner.go_on.set()
        for _ in range(2000):
            if server.get("/readyz").status == 200:
                break
        assert server.get("/readyz").json["status"] == "ready"
        assert server.complete("a", max_tokens=1).status == 200


def test_before_the_model_is_loaded_everything_says_so() -> None:
    with Served() as server:
        loaded, server.startup._service = server.startup._service, None
        assert server.get("/livez").status == 200
        assert (server.get("/readyz").status, server.get("/readyz").json) == (503, {"status": "loading"})
        assert server.complete("a").error["code"] == NotReady.code
        server.startup._service = loaded


def test_a_model_that_cannot_be_loaded_is_not_alive() -> None:
    with Served() as server:
        server.startup.failed()
        assert server.get("/livez").status == 503
        assert server.get("/readyz").json == {"status": "failed"}
        assert server.complete("a").status == 500
    assert Startup().health.phase == "loading"


def test_a_second_get_of_the_models_says_the_same(server: Served) -> None:
    listed = server.get("/v1/models").json
    assert [model["id"] for model in listed["data"]] == ["toy"]
    assert server.get("/v1/models/toy").json == listed["data"][0]


def test_metrics_hold_each_name_once_and_parse(server: Served) -> None:
    answer = server.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    helped = [line.split()[2] for line in answer.body.decode().splitlines() if line.startswith("# TYPE")]
    assert len(helped) == len(set(helped))
    assert "tidegate_jit_compiles_total" in helped
