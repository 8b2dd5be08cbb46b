"""Also cases A30 (names are no paths) and the request's id; metrics never take what a client made up."""

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest

from serving.errors import ServingError
from serving.transport import probes
from serving.transport.routes import ENDPOINTS
from tests.fakes import FakeRunner
from tests.fakes_http import Served


def test_ids_are_ours_and_the_clients_is_a_label(server: Served) -> None:
    first = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, {"X-Request-Id": "mine"})
    second = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, {"X-Request-Id": "mine"})
    assert first.headers["x-request-id"] == second.headers["x-request-id"] == "mine"
    assert first.headers["x-tidegate-id"] != second.headers["x-tidegate-id"]
    assert first.json["id"] != second.json["id"]
    assert "mine" not in first.json["id"]
    streamed = server.post(
        "/v1/completions", {"prompt": "a", "max_tokens": 1, "stream": True}, {"X-Request-Id": "mine"}
    )
    assert streamed.headers["x-request-id"] == "mine"


@pytest.mark.parametrize("label", ["", "x" * 129, "a b", "caf\xe9"])
def test_labels_that_are_no_plain_word_are_not_echoed(server: Served, label: str) -> None:
    answer = server.get("/livez", **{"X-Request-Id": label})
    assert answer.headers["x-request-id"] == answer.headers["x-tidegate-id"]


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "..%2f", "a\u0000b", "toy/", "TOY", " toy", "toy\n", ""]
)
def test_a30_only_the_served_name_is_a_model(server: Served, name: str) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/score", {"inputs": [{"text": "a"}]}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": []}),
    ):
        answer = server.post(path, {**body, "model": name})
        assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models/../../etc/passwd",
        "/v1/models/..%2f..%2fetc%2fpasswd",
        "/v1/models//etc/passwd",
        "/v1/models/toy/",
        "/v1/models/TOY",
        "/v1/models/a%00b",
        "/playground/../../etc/passwd",
        "/../etc/passwd",
        "/%2e%2e/etc/passwd",
        "/metrics/../livez",
    ],
)
def test_a30_paths_lead_nowhere(server: Served, path: str) -> None:
    answer = server.get(path)
    assert answer.status == 404
    assert "root:" not in answer.body.decode()
    assert answer.error["type"] == "invalid_request_error"


def test_wrong_methods_say_which_is_right(server: Served) -> None:
    answer = server.get("/v1/score")
    assert (answer.status, answer.error["code"]) == (405, "method_not_allowed")
    assert answer.headers["allow"] in answer.error["message"]
    assert "POST" in answer.error["message"]
    assert server.post("/livez", {}).status == 405


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/responses", "/v1/files", "/v1/moderations"])
def test_what_is_not_there_says_so(server: Served, path: str) -> None:
    answer = server.post(path, {"input": "a"})
    assert (answer.status, answer.error["code"]) == (400, "unsupported")
    assert path in answer.error["message"]


def test_metrics_have_route_templates_only(server: Served) -> None:
    for i in range(50):
        server.get(f"/random/{i}")
        server.get(f"/v1/models/m{i}")
        server.complete("a", model=f"m{i}")
        server.send(f"M{i}", "/livez")
    series = [line for line in server.get("/metrics").body.decode().splitlines() if "http_requests_total{" in line]
    routes = {line.split('route="')[1].split('"')[0] for line in series}
    assert routes <= {endpoint.path for endpoint in ENDPOINTS} | {"unmatched", "/openapi.json"}
    assert {line.split('method="')[1].split('"')[0] for line in series} <= {"GET", "POST", "other"}


def test_the_access_line_has_ids_and_templates_and_no_content(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tidegate.http")
    server.complete("secret words", max_tokens=1)
    server.get("/v1/models/secret-name?q=secret")
    lines = [str(vars(record)) for record in caplog.records if record.name == "tidegate.http"]
    assert any("/v1/models/{id}" in line for line in lines)
    assert all("secret" not in line for line in lines)


def test_what_nobody_foresaw_is_logged_once_and_told_to_no_one(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "ModelList", lambda *_: 1 / 0)
    with Served() as server:
        answer = server.get("/v1/models")
        assert (answer.status, answer.error["code"]) == (500, "internal_error")
        assert "division" not in answer.body.decode()
        assert server.get("/livez").status == 200
    assert [record.exc_info is not None for record in caplog.records if record.levelname == "ERROR"] == [True]


def test_every_error_class_has_a_status_and_a_code() -> None:
    todo, seen = [ServingError], []
    while todo:
        error = todo.pop()
        todo += error.__subclasses__()
        seen.append(error)
    assert all(400 <= error.status < 600 and error.code and error.kind for error in seen)


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_that_passes_in_the_queue_is_a_504_in_both_modes(stream: bool) -> None:
    runner = FakeRunner(held=True)
    with Served(runner=runner) as server, ThreadPoolExecutor(2) as clients:
        first = clients.submit(server.complete, "a", max_tokens=2)
        while not runner.batches:
            continue
        late = clients.submit(server.complete, "b", max_tokens=2, timeout_ms=1, stream=stream)
        for _ in range(10):  # far more than a millisecond
            server.get("/livez")
        runner.release(1000)
        assert first.result().status == 200
        assert (late.result().status, late.result().error["code"]) == (504, "deadline_exceeded")


def test_a12_half_a_surrogate_pair_in_a_header_harms_nothing(server: Served) -> None:
    body = b'{"prompt":"a","max_tokens":1}'
    with server.open_socket() as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: \xed\xa0\x80\r\nX-Other: \xff\r\n"
        connection.sendall(head + b"Content-Length: " + str(len(body)).encode() + b"\r\n\r\n" + body)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
