"""Profiles over HTTP: kept by name, listed and deleted by their own tenant only, found again after a restart."""

from collections.abc import Iterator
from hashlib import sha256
from http.client import HTTPConnection
from pathlib import Path

import pytest

from serving.config import ApiKey, EngineConfig
from tests.fakes_http import Served

KEYS = tuple(ApiKey(tenant=tenant, sha256=sha256(tenant.encode()).hexdigest()) for tenant in ("ann", "bob"))
PROMPT = "a standing context of some length, and then " * 3


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    with Served(keys=KEYS) as served:
        yield served


def auth(tenant: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {tenant}"}


def ask(server: Served, tenant: str, **fields: object) -> int:
    """Cached tokens."""
    body = {"model": "toy", "prompt": PROMPT, "max_tokens": 2, "temperature": 0, **fields}
    answer = server.post("/v1/completions", body, auth(tenant))
    assert answer.status == 200, answer.body
    return int(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"])


def listed(server: Served, tenant: str) -> dict[str, int]:
    data = server.get("/v1/profiles", **auth(tenant)).json["data"]
    return {entry["id"]: entry["tokens"] for entry in data}


def delete(server: Served, tenant: str, name: str) -> int:
    connection = HTTPConnection("127.0.0.1", server.port)
    connection.request("DELETE", f"/v1/profiles/{name}", headers=auth(tenant))
    status = connection.getresponse().status
    connection.close()
    return status


def test_only_its_own_tenant_sees_and_deletes_a_profile(shared: Served) -> None:
    ask(shared, "ann", profile_id="me")
    assert listed(shared, "ann") == {"me": len(PROMPT) // 16 * 16}
    assert listed(shared, "bob") == {}
    assert delete(shared, "bob", "me") == 404
    assert delete(shared, "ann", "me") == 200
    assert delete(shared, "ann", "me") == 404
    assert listed(shared, "ann") == {}
    assert ask(shared, "bob", profile_id="me") == 0


@pytest.mark.parametrize("name", ["", "a/b", "../x", ".x", "a b", "é", "a\n", "x" * 129])
def test_names_are_short_and_plain(shared: Served, name: str) -> None:
    body = {"prompt": "a", "max_tokens": 1, "profile_id": name}
    answer = shared.post("/v1/completions", body, auth("ann"))
    assert answer.status == 400
    assert "profile_id" in answer.error["message"]


def test_a_restart_finds_it_on_the_disk(tmp_path: Path) -> None:
    config = EngineConfig(profile_dir=str(tmp_path / "profiles"))
    with Served(keys=KEYS, engine_config=config) as server:
        assert ask(server, "ann", profile_id="me") == 0
    with Served(keys=KEYS, engine_config=config) as server:
        assert listed(server, "ann") == {"me": len(PROMPT) // 16 * 16}
        assert listed(server, "bob") == {}
        assert ask(server, "bob") == 0
        assert ask(server, "ann", profile_id="me") == len(PROMPT) // 16 * 16 - 16 * (len(PROMPT) % 16 == 0)
        assert delete(server, "ann", "me") == 200
    assert not list((tmp_path / "profiles").iterdir())


def test_a_profile_beyond_the_quota_is_refused_with_the_numbers() -> None:
    with Served(engine_config=EngineConfig(profile_bytes_per_tenant=100)) as server:
        answer = server.complete(PROMPT, max_tokens=1, profile_id="me")
        assert (answer.status, answer.error["param"]) == (400, "profile_id")
        assert "100 are allowed" in answer.error["message"]
