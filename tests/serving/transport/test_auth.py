"""Also case A29: keys over HTTP."""

import hashlib
import inspect
import logging

import pytest

from serving.config import ApiKey
from serving.errors import Unauthorized
from serving.transport import auth
from serving.transport.auth import DEFAULT_TENANT, Authenticator
from tests.fakes_http import Answer, Served

KEY = "sk-correct-horse"
OTHER = "sk-other"
KEYS = tuple(
    ApiKey(tenant=tenant, sha256=hashlib.sha256(key.encode()).hexdigest()) for tenant, key in (("a", KEY), ("b", OTHER))
)
WRONG = [
    "Bearer ",
    f"Bearer {KEY[:-1]}",
    f"Bearer {KEY}x",
    "Bearer 钥匙",
    KEY,
    f"Basic {KEY}",
    "Bearer",
    "",
    f"Bearer {KEY} {KEY}",
]


def test_each_key_is_a_tenant() -> None:
    authenticator = Authenticator(KEYS)
    assert authenticator.tenant(f"Bearer {KEY}") == "a"
    assert authenticator.tenant(f"bearer {OTHER}") == "b"


def test_without_keys_everyone_is_the_default_tenant() -> None:
    assert Authenticator(()).tenant(None) == Authenticator(()).tenant("Bearer x") == DEFAULT_TENANT


@pytest.mark.parametrize("header", [None, *WRONG, "Bearer \udcff\udc80", "Bearer " + "k" * 1_000_000])
def test_anything_else_is_the_same_refusal(header: str | None) -> None:
    with pytest.raises(Unauthorized) as caught:
        Authenticator(KEYS).tenant(header)
    assert caught.value.message == Authenticator.refusal().message


def test_keys_are_compared_as_hashes_in_constant_time() -> None:
    source = inspect.getsource(auth)
    assert "hmac.compare_digest(digest, known)" in source
    assert "==" not in inspect.getsource(Authenticator.tenant)


@pytest.fixture(scope="module")
def locked() -> Served:
    with Served(keys=KEYS) as server:
        yield server


def raw(server: Served, authorization: bytes, body: bytes = b'{"prompt":"a","max_tokens":1}') -> Answer:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: " + authorization
    with server.open_socket() as connection:
        connection.sendall(head + b"\r\nContent-Length: " + str(len(body)).encode() + b"\r\n\r\n" + body)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    top, _, rest = answer.partition(b"\r\n\r\n")
    return Answer(int(top.split()[1]), {}, rest)


def test_a29_the_right_key_is_let_in(locked: Served) -> None:
    for scheme in ("Bearer", "bearer", "BEARER"):
        answer = locked.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, {"Authorization": f"{scheme} {KEY}"})
        assert answer.status == 200


def test_a29_missing_malformed_and_wrong_get_one_body(locked: Served) -> None:
    refused = locked.complete("a")
    assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")
    assert refused.headers["www-authenticate"] == "Bearer"
    for header in WRONG:
        answer = raw(locked, header.encode())
        assert (answer.status, answer.body) == (401, refused.body)
    assert raw(locked, b"Bearer \xff\xfe").status == 401


def test_a29_a_key_of_a_mebibyte_is_refused_without_being_kept(locked: Served) -> None:
    try:
        answer = raw(locked, b"Bearer " + b"k" * (1 << 20))
    except ConnectionError:
        pass  # the server closed before all of it was sent
    else:
        assert answer.status == 401
        assert answer.error["code"] == "invalid_api_key"
    assert locked.complete("a").status == 401


def test_a29_the_key_comes_before_the_body(locked: Served) -> None:
    answer = locked.post("/v1/completions", b"{ not json")
    assert answer.status == 401
    assert locked.get("/v1/models").status == 401
    for path in ("/livez", "/readyz", "/metrics", "/openapi.json"):
        assert locked.get(path).status == 200


def test_a29_keys_are_in_no_log(locked: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    locked.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, {"Authorization": f"Bearer {KEY}"})
    locked.post("/v1/completions", {"prompt": "a"}, {"Authorization": f"Bearer {KEY}x"})
    with locked.open_socket() as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nAuthorization: Bearer " + KEY.encode() * 1000 + b"\r\n\r\n")
        connection.recv(65536)
    assert KEY not in caplog.text
    assert KEY not in str([vars(record) for record in caplog.records])
    assert "tenant" in str([vars(record) for record in caplog.records])
