"""Also case A08: bodies that are too large, and requests that are no HTTP."""

import gzip
import json

import pytest

from serving.config import ServerConfig
from tests.fakes_http import Answer, Served

LIMIT = 64 * 1024


@pytest.fixture(scope="module")
def small() -> Served:
    with Served(config=ServerConfig(port=0, max_body_bytes=LIMIT, body_timeout_s=0.2, shutdown_s=0.2)) as server:
        yield server


def exchange(server: Served, raw: bytes) -> Answer:
    """Send bytes, read one answer by its declared length."""
    with server.open_socket() as connection:
        connection.sendall(raw)
        answer = b""
        while b"\r\n\r\n" not in answer:
            piece = connection.recv(65536)
            assert piece, "the server closed without an answer"
            answer += piece
        top, _, body = answer.partition(b"\r\n\r\n")
        length = int(top.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        while len(body) < length:
            body += connection.recv(65536)
    return Answer(int(top.split()[1]), {}, body)


def head(*lines: str, path: str = "/v1/completions") -> bytes:
    return "\r\n".join((f"POST {path} HTTP/1.1", "Host: x", "Connection: close", *lines, "", "")).encode()


def test_a08_a_body_over_the_limit_is_413_with_the_limit(small: Served) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/score", "/tokenize", "/detokenize"):
        answer = small.post(path, b'{"prompt":"a"' + b" " * LIMIT + b"}")
        assert (answer.status, answer.error["code"]) == (413, "body_too_large")
        assert str(LIMIT) in answer.error["message"]
    assert small.post("/v1/completions", b'{"prompt":"a","max_tokens":1' + b" " * (LIMIT - 30) + b"}").status == 200


def test_a08_the_declared_length_alone_is_enough(small: Served) -> None:
    answer = exchange(small, head("Content-Length: 67108864"))
    assert answer.status == 413


def test_a08_chunks_are_counted_as_they_come(small: Served) -> None:
    chunk = b"2000\r\n" + b" " * 0x2000 + b"\r\n"
    answer = exchange(small, head("Transfer-Encoding: chunked") + chunk * 20 + b"0\r\n\r\n")
    assert (answer.status, answer.error["code"]) == (413, "body_too_large")
    body = b'{"prompt":"a","max_tokens":1}'
    fine = f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n"
    assert exchange(small, head("Transfer-Encoding: chunked") + fine).status == 200


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "GZIP", "gzip, gzip"])
def test_a08_compressed_bodies_are_refused_uninflated(small: Served, encoding: str) -> None:
    bomb = gzip.compress(b"\0" * 50_000_000)
    headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
    answer = small.send("POST", "/v1/completions", bomb, headers)
    assert (answer.status, answer.error["code"]) == (415, "unsupported_media_type")


def test_a08_a_body_shorter_than_declared_harms_nobody(small: Served) -> None:
    with small.open_socket() as connection:
        connection.sendall(head("Content-Length: 100") + b'{"prompt":')
    waited = exchange(small, head("Content-Length: 100") + b'{"prompt":')
    assert (waited.status, waited.error["code"]) == (408, "request_timeout")
    assert small.complete("a", max_tokens=1).status == 200


def test_other_media_are_refused(small: Served) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    for content_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        assert small.send("POST", "/v1/completions", body, {"Content-Type": content_type}).status == 415
    for content_type in ("application/json", "application/json; charset=utf-8"):
        assert small.send("POST", "/v1/completions", body, {"Content-Type": content_type}).status == 200


@pytest.mark.parametrize(
    "raw", [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"]
)
def test_what_is_no_http_gets_an_error_in_our_form(small: Served, raw: bytes) -> None:
    answer = exchange(small, raw)
    assert (answer.status, answer.error["code"]) == (400, "invalid_request")


def test_a_header_that_is_too_long_is_431(small: Served) -> None:
    answer = exchange(small, b"GET /livez HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 9000 + b"\r\n\r\n")
    assert (answer.status, answer.error["code"]) == (431, "headers_too_large")


def test_a_connection_is_kept_for_the_next_request(small: Served) -> None:
    with small.open_socket() as connection:
        for _ in range(3):
            connection.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200 OK" in connection.recv(65536)


def test_head_is_get_without_the_body(small: Served) -> None:
    answer = small.send("HEAD", "/livez")
    assert (answer.status, answer.body) == (200, b"")


def test_a_client_that_asks_first_is_told_to_go_on_only_where_the_body_is_read(small: Served) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    asking = head("Expect: 100-continue", f"Content-Length: {len(body)}")
    with small.open_socket() as connection:
        connection.sendall(asking)
        assert connection.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 OK\r\n")
    assert exchange(small, head("Expect: 100-continue", f"Content-Length: {LIMIT + 1}")).status == 413
    assert exchange(small, head("Expect: 100-continue", "Content-Length: 5", "Content-Encoding: gzip")).status == 415


def test_an_expectation_that_nobody_knows_is_ignored(small: Served) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    assert exchange(small, head("Expect: a miracle", f"Content-Length: {len(body)}") + body).status == 200
