from pathlib import Path
from typing import Any

import pytest

from scripts import peer_turns
from scripts.peer_servers import Peer
from scripts.peer_turns import NEW, PROMPT, Plan, body, compare, prompt


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return Plan((2, 4), 3, 32000, 8790, tmp_path, 2)


def test_prompts_are_distinct_and_repeatable(plan: Plan) -> None:
    prompts = [tuple(prompt(plan, seed)) for seed in range(50)]
    assert len(set(prompts)) == 50
    assert all(len(ids) == PROMPT and min(ids) >= 300 and max(ids) < 32000 for ids in prompts)
    assert body(plan, 7, "m", 3)["prompt"] == prompt(plan, 10)
    assert body(plan, 7, "m", 3)["max_tokens"] == NEW


def test_ours_and_the_peer_take_turns(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def turn(peer: Peer, plan: Plan, number: int, log: Path) -> dict[int, dict[str, Any]]:
        order.append(f"{peer.name} {number}")
        return {clients: {"requests_per_s": 1.0, "clients": clients} for clients in plan.clients}

    monkeypatch.setattr(peer_turns, "serve_turn", turn)
    ours, theirs = compare(Peer("other", ()), plan, pairs=2)
    assert order == ["tidegate 0", "other 0", "tidegate 1", "other 1"]
    assert [len(found[clients]) for found in (ours, theirs) for clients in plan.clients] == [2, 2, 2, 2]
