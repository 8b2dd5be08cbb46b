"""Profiles: standing contexts that clients name, each a chain of page keys, under a quota of bytes a tenant.

A profile is what prompts under its name have in common. The first prompt is taken whole; a later one that shares at
least half of it cuts it down to what both start with, so the standing context is found without being marked; one that
shares less replaces it. A tenant's profiles that were used longest ago go when the quota is full; other tenants' never
do. Any thread may call. Invariant: a tenant's profiles together are within its quota.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

Name = tuple[str, str]  # tenant, profile id


@dataclass(slots=True, eq=False)
class Profile:
    tenant: str
    id: str
    keys: tuple[bytes, ...]
    on_disk: bool = False

    @property
    def name(self) -> Name:
        return (self.tenant, self.id)

    def common(self, keys: Sequence[bytes]) -> int:
        """Pages that a chain of keys shares with it."""
        pairs = list(zip(self.keys, keys, strict=False))
        return next((i for i, (mine, other) in enumerate(pairs) if mine != other), len(pairs))


class Profiles:
    """`page_bytes`: of one page over all layers. `quota_bytes`: of a tenant."""

    def __init__(self, page_bytes: int, quota_bytes: int) -> None:
        self._page_bytes, self.quota_bytes = page_bytes, quota_bytes
        self._lock = threading.Lock()
        self._tenants: dict[str, OrderedDict[str, Profile]] = {}  # the longest unused first

    def num_bytes(self, num_pages: int) -> int:
        return num_pages * self._page_bytes

    def get(self, name: Name) -> Profile | None:
        """A use of it."""
        with self._lock:
            profiles = self._tenants.get(name[0], OrderedDict[str, Profile]())
            if name[1] in profiles:
                profiles.move_to_end(name[1])
            return profiles.get(name[1])

    def peek(self, name: Name) -> Profile | None:
        """Not a use of it."""
        return self._tenants.get(name[0], OrderedDict[str, Profile]()).get(name[1])

    def has(self, profile: Profile) -> bool:
        """It was neither dropped nor replaced."""
        return self.peek(profile.name) is profile

    def of(self, tenant: str) -> list[Profile]:
        """The longest unused first."""
        with self._lock:
            return list(self._tenants.get(tenant, OrderedDict[str, Profile]()).values())

    def keep(self, name: Name, keys: Sequence[bytes]) -> tuple[Profile | None, list[Profile]]:
        """A prompt under this name has these whole pages: the profile as it is now, and those that are no more.
        None where nothing fits the quota."""
        old = self.get(name)
        wanted = tuple(keys) if old is None else _shared(old, keys)
        if old is not None and wanted == old.keys:
            return old, []
        profile = Profile(*name, wanted)
        return (profile, self.add(profile)) if self._fits(len(wanted)) else (None, [])

    def add(self, profile: Profile) -> list[Profile]:
        """As the newest; returns those that it displaces, one of its own name among them."""
        with self._lock:
            profiles = self._tenants.setdefault(profile.tenant, OrderedDict())
            old = profiles.pop(profile.id, None)
            gone = [] if old is None else [old]
            profiles[profile.id] = profile
            while self.num_bytes(sum(len(p.keys) for p in profiles.values())) > self.quota_bytes:
                gone.append(profiles.popitem(last=False)[1])
            return gone

    def drop(self, name: Name) -> Profile | None:
        with self._lock:
            return self._tenants.get(name[0], OrderedDict[str, Profile]()).pop(name[1], None)

    def forget(self, profile: Profile) -> None:
        """Unless another of its name came."""
        if self.has(profile):
            self.drop(profile.name)

    def _fits(self, num_pages: int) -> bool:
        return 0 < self.num_bytes(num_pages) <= self.quota_bytes


def _shared(old: Profile, keys: Sequence[bytes]) -> tuple[bytes, ...]:
    common = old.common(keys)
    if common == len(keys):  # a shorter prompt says nothing about the rest
        return old.keys
    return old.keys[:common] if 2 * common >= len(old.keys) else tuple(keys)
