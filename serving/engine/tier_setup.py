"""The KV tiers that a configuration asks for."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from serving.batch import Runner
from serving.config import EngineConfig

from .costs import StepCosts
from .host_tier import HostTier
from .kv_tiers import KvTiers
from .profile_disk import ProfileDisk, Work
from .profiles import Profiles

_LAYOUT = 2  # of a page's bytes: change it when pools change


def make_tiers(
    config: EngineConfig, runner: Runner, costs: StepCosts, fingerprint: str, run: Callable[[Work], object]
) -> KvTiers:
    """`fingerprint` of the model; `run` gets work to the disk's thread. ValueError, OSError for people."""
    if not config.prefix_cache or config.host_tier_bytes == 0:
        return KvTiers.off()

    def pays() -> bool:
        compute_s = costs.prefill_token_s() * config.page_size
        return compute_s == 0.0 or runner.page_copy_s < compute_s

    return KvTiers(
        HostTier(config.host_tier_bytes),
        Profiles(runner.page_bytes, config.profile_bytes_per_tenant),
        _disk(config, runner, fingerprint, run),
        page_size=config.page_size,
        pays=pays,
    )


def _disk(config: EngineConfig, runner: Runner, fingerprint: str, run: Callable[[Work], object]) -> ProfileDisk | None:
    if not config.profile_dir:
        return None
    if not fingerprint:
        raise ValueError("profile_dir needs a model with a fingerprint: its files are for one model alone")
    layout = [_LAYOUT, fingerprint, config.page_size, runner.page_bytes, config.deterministic]
    mark = hashlib.sha256(json.dumps(layout).encode()).hexdigest()
    return ProfileDisk(Path(config.profile_dir).expanduser(), mark, runner.page_bytes, run)
