import itertools
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.config import ApiKey, Config
from serving.config_file import ConfigError, is_loopback, load_config, render_config

HASH = "0" * 64


def problems(text: str = "", flags: dict[str, object] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(text, flags)
    return caught.value.problems


def test_nothing_gives_the_defaults() -> None:
    assert load_config() == Config()


def test_flags_go_over_the_file() -> None:
    text = "[server]\nport = 1\nmax_rows = 7\n[model]\npath = 'm'"
    config = load_config(text, {"server.port": "2", "engine.max_wait_ms": "1.5", "log.access": "false"})
    assert (config.server.port, config.server.max_rows, config.model.path) == (2, 7, "m")
    assert (config.engine.max_wait_ms, config.log.access) == (1.5, False)


def test_all_problems_are_found_at_once_with_their_dotted_keys() -> None:
    text = f"""
    [server]
    port = "x"
    prot = 1
    stream_stall_s = nan
    max_rows = true
    [auth]
    keys = [{{tenant = "a b", sha256 = "{HASH}"}}, {{tenant = "a"}}, {{tenant = "a", sha256 = "{HASH}", key = "k"}}]
    [nope]
    [model]
    dtype = "f"
    """
    found = problems(text, {"engine.max_slots": "0", "log.access": "maybe"})
    assert sorted(problem.partition(":")[0] for problem in found) == [
        "auth.keys[0].tenant",
        "auth.keys[1].sha256",
        "auth.keys[2].key",
        "engine.max_slots",
        "log.access",
        "model.dtype",
        "nope",
        "server.max_rows",
        "server.port",
        "server.prot",
        "server.stream_stall_s",
    ]
    assert "known here: host, port" in next(problem for problem in found if "prot" in problem)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("server = 1", "server"),
        ("[auth]\nkeys = 1", "auth.keys"),
        ("[auth]\nkeys = [1]", "auth.keys[0]"),
        ("[engine]\nmax_slots = 1.5", "engine.max_slots"),
        ("[engine]\nsoft_size = 99", "engine"),
        ("[engine]\nmax_wait_ms = inf", "engine.max_wait_ms"),
    ],
)
def test_wrong_forms_are_named(text: str, key: str) -> None:
    assert [problem.partition(":")[0] for problem in problems(text)] == [key]


def test_what_is_no_toml_says_where() -> None:
    assert "line 1" in problems("[server\nport = 1")[0]


def test_flags_below_a_value_are_a_problem_not_a_crash() -> None:
    assert "is not a table" in problems("server = 1", {"server.port": "1"})[0]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.1", "example.com", "10.0.0.1"])
def test_a_public_address_needs_keys(host: str) -> None:
    (problem,) = problems(flags={"server.host": host})
    assert problem.startswith("server.host")
    assert "API key" in problem
    keys = f'[auth]\nkeys = [{{tenant = "a", sha256 = "{HASH}"}}]'
    assert load_config(keys, {"server.host": host}).auth.keys == (ApiKey(tenant="a", sha256=HASH),)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "::1"])
def test_loopback_does_not(host: str) -> None:
    assert is_loopback(host)
    assert load_config(flags={"server.host": host}).server.host == host


def test_one_key_of_two_tenants_is_refused() -> None:
    keys = f'{{tenant = "a", sha256 = "{HASH}"}}, {{tenant = "b", sha256 = "{HASH}"}}'
    assert "twice" in problems(f"[auth]\nkeys = [{keys}]")[0]


def test_the_deterministic_mode_is_for_one_device() -> None:
    assert load_config(flags={"engine.deterministic": "true"}).engine.deterministic
    (problem,) = problems(flags={"engine.deterministic": "true", "model.mesh": "tensor=2"})
    assert problem.startswith("engine.deterministic")


def test_speculation_is_not_for_the_deterministic_mode() -> None:
    assert load_config(flags={"engine.speculate": "true"}).engine.speculate
    (problem,) = problems(flags={"engine.deterministic": "true", "engine.speculate": "true"})
    assert problem.startswith("engine.speculate")


@given(st.text(max_size=20), st.integers(0, 65535), st.floats(0.001, 1e9), st.booleans())
def test_what_is_printed_reads_back_the_same(name: str, port: int, stall_s: float, access: bool) -> None:
    flags = {"model.served_name": name, "server.port": port, "server.stream_stall_s": stall_s, "log.access": access}
    config = load_config(f'[auth]\nkeys = [{{tenant = "a", sha256 = "{HASH}"}}]', flags)
    assert load_config(render_config(config)) == config


def test_what_is_printed_is_commented_toml() -> None:
    text = render_config(Config())
    assert tomllib.loads(text)["server"]["port"] == 8000
    lines = text.splitlines()
    for before, line in itertools.pairwise(lines):
        if "=" in line and not line.startswith("#"):
            assert before.startswith("# ")
    assert "# TCP port; 0: any free one (0 to 65535)" in lines
