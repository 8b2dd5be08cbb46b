"""KV pages beyond the device: host memory and, for profiles, the disk. What moves, when, and whether it pays.

Down: a page that the device gives up is read first if it was used twice, is a profile's, or belongs to a row that was
stopped; a profile's pages are read as soon as its prompt is through, and go on to the disk when all have come. Up: at
admission, pages found here are written to the row's fresh pages where that takes less time than computing them. What is
on the disk alone is loaded into host memory when a request names its profile; that row waits, others go on. All keys
hang on the tenant, so none of this crosses tenants. Owned by the engine thread, except where said. Invariant: nothing
here holds a page of the device; losing the device's pages loses no more than what was on its way.
"""

from collections.abc import Callable
from collections.abc import Sequence as Keys

from serving.batch import Runner
from serving.errors import BadRequest
from serving.types import ProfileInfo

from .host_tier import Content, HostTier
from .page_moves import PageMoves
from .profile_disk import Loaded, ProfileDisk
from .profiles import Name, Profile, Profiles
from .sequence import Sequence

_MAX_COMING = 64  # pages on their way to the host for which the device holds buffers
_DISK_WAIT_S = 0.001  # what comes meanwhile waits no longer


class KvTiers:
    """`page_size` in tokens. `pays`: whether copying a page to the device is quicker than computing it."""

    def __init__(
        self,
        host: HostTier,
        profiles: Profiles,
        disk: ProfileDisk | None = None,
        *,
        page_size: int,
        pays: Callable[[], bool] = lambda: True,
    ) -> None:
        self.host, self.profiles, self.disk = host, profiles, disk
        self._page_size, self._pays = page_size, pays
        self._moves = PageMoves()
        self._loading: dict[Name, Profile] = {}
        self._unsaved: dict[Name, Profile] = {}  # pages still to come, or to be handed to the disk
        self._from_disk: set[bytes] = set()  # loaded and not used yet
        self._on = host.capacity_bytes > 0
        self.num_host_tokens = 0  # prompt tokens whose prefill a page from here saved, those from the disk included
        self.num_disk_tokens = 0
        for profile in disk.index() if disk is not None else []:
            self._gone(profiles.add(profile))

    @classmethod
    def off(cls) -> "KvTiers":
        return cls(HostTier(0), Profiles(1, 0), page_size=1)

    @property
    def num_bad_files(self) -> int:
        return 0 if self.disk is None else self.disk.num_bad

    # Rows

    def check(self, row: Sequence) -> None:
        """BadRequest where a profile could never be kept; one without a whole page is none. Any thread may call it."""
        num_pages = row.num_asked // self._page_size
        if not self._on or num_pages == 0:
            row.profile = None
        if row.profile is None or row.row != 0:
            return
        need, room = self.profiles.num_bytes(num_pages), min(self.profiles.quota_bytes, self.host.capacity_bytes)
        if need > room:
            raise BadRequest(
                f"a profile of {num_pages * self._page_size} tokens takes {need} bytes; {room} are allowed "
                "(engine.profile_bytes_per_tenant, engine.host_tier_bytes)",
                param="profile_id",
            )

    def arrive(self, row: Sequence, keys: Keys[bytes], num_known: int) -> None:
        """A row with a profile is queued; `num_known` of its `keys` are on the device. Starts a load where it helps."""
        profile = None if row.profile is None else self.profiles.get((row.tenant, row.profile))
        if profile is None or self.disk is None or not profile.on_disk or profile.name in self._loading:
            return
        wanted = profile.common(keys)
        if wanted > num_known + self.host.count(keys[num_known:wanted]):
            self._loading[profile.name] = profile
            self.disk.load(profile)

    def is_loading(self, row: Sequence) -> bool:
        """Its profile is on its way from the disk: soon it can be used."""
        return row.profile is not None and (row.tenant, row.profile) in self._loading

    def find(self, keys: Keys[bytes]) -> list[Content]:
        """Pages to `promote`: the longest prefix that is here, if it pays."""
        return self.host.match(keys) if self._on and keys and self._pays() else []

    def promote(self, keys: Keys[bytes], pages: Keys[int], contents: Keys[Content]) -> None:
        """These fresh pages get this content before the next step."""
        for key, page, content in zip(keys, pages, contents, strict=True):
            self._moves.write(page, content)
            self.num_disk_tokens += self._page_size * (key in self._from_disk)
            self._from_disk.discard(key)
        self.num_host_tokens += self._page_size * len(keys)

    def keep(self, row: Sequence) -> Keys[bytes]:
        """The prompt's whole pages are on the device for good: they are the row's profile. Returns the profile's keys.
        The first row speaks for its request: the others would only take turns in replacing it."""
        keys = row.keys[: row.num_asked // self._page_size]
        if row.profile is None or row.row != 0 or not self._on:
            return ()
        profile, gone = self.profiles.keep((row.tenant, row.profile), keys)
        row.profile = None  # done
        if profile is not None and not profile.on_disk:
            self.host.pin(profile, profile.keys)
        self._gone(gone)
        if profile is None:
            return ()
        if not profile.on_disk:
            self._unsaved[profile.name] = profile
            for key, page in zip(profile.keys, row.pages, strict=False):
                self._read(key, page)
        return profile.keys

    # Pages

    def evicted(self, key: bytes, page: int) -> None:
        """The device gives up a page that may be wanted again."""
        if self._on and self._moves.num_coming < _MAX_COMING:
            self._read(key, page)

    def _read(self, key: bytes, page: int) -> None:
        if key not in self.host and not self._moves.is_coming(key):
            self._moves.read(key, page)

    # Turns

    @property
    def busy(self) -> bool:
        """Something is to be dispatched, read or collected, and will not be unless the engine turns."""
        return len(self._moves) > 0 or bool(self._unsaved)

    @property
    def awaits_disk(self) -> bool:
        return bool(self._loading)

    def wait(self) -> None:
        """For the disk, for a moment."""
        if self.disk is not None:
            self.disk.wait(_DISK_WAIT_S)

    def dispatch(self, runner: Runner) -> None:
        """Queued moves, before the step that relies on them. Raises what the runner raises."""
        self._moves.dispatch(runner)

    def collect(self, *, wait: bool) -> None:
        """Take in what has come from the device and the disk; `wait`: for the device, which has nothing else to do."""
        for key, content in self._moves.finished(wait=wait):
            self.host.put(key, content)
        for done in self.disk.collect() if self.disk is not None else ():
            self._take(done)
        for profile in list(self._unsaved.values()):
            self._try_save(profile)

    def lose_device(self) -> None:
        """The device's pages are gone, and with them what was on its way."""
        self._moves.clear()

    def turn_off(self) -> None:
        """After a fault of a move: the engine goes on without tiers."""
        self._on = False
        self._moves.clear()
        self._unsaved.clear()

    def _take(self, done: Loaded) -> None:
        del self._loading[done.profile.name]
        if done.contents is None:
            self.profiles.forget(done.profile)
            return
        self._from_disk = {key for key in self._from_disk if key in self.host}
        for key, content in reversed(list(zip(done.profile.keys, done.contents, strict=True))):
            if key not in self.host and self.host.put(key, content):
                self._from_disk.add(key)

    def _try_save(self, profile: Profile) -> None:
        """All pages are here: to the disk. Some will not come: until a prompt brings them again."""
        if not self.profiles.has(profile):
            del self._unsaved[profile.name]
        elif self.host.count(profile.keys) == len(profile.keys):
            del self._unsaved[profile.name]
            if self.disk is not None:
                contents = self.host.match(profile.keys)
                self.disk.save(
                    profile,
                    contents,
                    wanted=lambda: self.profiles.has(profile),
                    saved=lambda: self._saved(profile),
                )
        elif not any(self._moves.is_coming(key) for key in profile.keys):
            del self._unsaved[profile.name]

    # Profiles, any thread

    def _saved(self, profile: Profile) -> None:
        """The copy in memory may go from now on."""
        profile.on_disk = True
        self.host.unpin(profile)

    def listed(self, tenant: str) -> list[ProfileInfo]:
        """The longest unused first."""
        return [
            ProfileInfo(p.id, len(p.keys) * self._page_size, self.profiles.num_bytes(len(p.keys)), self.places(p))
            for p in self.profiles.of(tenant)
        ]

    def delete(self, name: Name) -> bool:
        """Whether there was one. Pages that are still on the device are ordinary cached pages from now on."""
        profile = self.profiles.drop(name)
        if profile is None:
            return False
        self._gone([profile])
        return True

    def places(self, profile: Profile) -> tuple[str, ...]:
        """Where all of it is kept, beside the device."""
        in_host = self.host.count(profile.keys) == len(profile.keys)
        return ("memory",) * in_host + ("disk",) * profile.on_disk

    def _gone(self, profiles: list[Profile]) -> None:
        """These are no more, unless another of the same name came."""
        for profile in profiles:
            self.host.unpin(profile)
            self.host.discard(profile.keys)
            if self.disk is not None and self.profiles.peek(profile.name) is None:
                self._remove(self.disk, profile.name)

    def _remove(self, disk: ProfileDisk, name: Name) -> None:
        disk.remove(name, lambda: self.profiles.peek(name) is not None)
