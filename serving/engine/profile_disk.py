"""The directory of profile files, and the thread that reads and writes them: the engine never waits for a disk.

Work is done in the order in which it came; what was loaded is collected later, as with masks. A file that is corrupt,
truncated or of another model is a miss: counted, logged once, never an error. `run` is how work gets to the thread;
tests call it at once.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .host_tier import Content
from .profile_file import SUFFIX, BadProfile, Header, file_name, read_header, read_profile, write_profile
from .profiles import Name, Profile

_log = logging.getLogger("tidegate.profiles")

Work = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Loaded:
    """`contents` None: it could not be."""

    profile: Profile
    contents: list[Content] | None


class ProfileDisk:
    """Raises OSError where the directory cannot be made or read."""

    def __init__(self, directory: Path, fingerprint: str, page_bytes: int, run: Callable[[Work], object]) -> None:
        self._directory, self._fingerprint, self._page_bytes, self._run = directory, fingerprint, page_bytes, run
        directory.mkdir(0o700, parents=True, exist_ok=True)  # contexts of users
        self._wake = threading.Condition()
        self._done: list[Loaded] = []
        self.num_out = 0  # loads that have not been collected
        self.num_bad = 0  # files that could not be used, each counted once
        self._bad: set[tuple[Path, int]] = set()

    def index(self) -> list[Profile]:
        """Those of this model, the oldest first. Their sums are checked when they are loaded."""
        found: list[tuple[int, Profile]] = []
        for path in sorted(self._directory.glob("*" + SUFFIX)):
            try:
                header = read_header(path)
                if header.fingerprint != self._fingerprint or header.page_bytes != self._page_bytes:
                    raise BadProfile("it is of another model, dtype or page size")
                if path.name != file_name(header.fingerprint, header.tenant, header.profile):
                    raise BadProfile("its name is not its own")
                profile = Profile(header.tenant, header.profile, header.key_bytes, on_disk=True)
                found.append((path.stat().st_mtime_ns, profile))
            except (BadProfile, OSError) as error:
                self._report(path, error)
        return [profile for _, profile in sorted(found, key=lambda entry: entry[0])]

    def save(
        self, profile: Profile, contents: list[Content], *, wanted: Callable[[], bool], saved: Callable[[], None]
    ) -> None:
        """`wanted` is asked, and `saved` told, in the thread: what was dropped meanwhile is not written after its
        removal."""

        def work() -> None:
            if wanted() and self._save(profile, contents):
                saved()

        self._run(work)

    def load(self, profile: Profile) -> None:
        self.num_out += 1

        def work() -> None:
            loaded = Loaded(profile, self._load(profile))
            with self._wake:
                self._done.append(loaded)
                self._wake.notify_all()

        self._run(work)

    def remove(self, name: Name, wanted: Callable[[], bool]) -> None:
        """Unless a profile of this name is `wanted` again by then."""
        path = self._path(name)
        self._run(lambda: None if wanted() else self._unlink(path))

    def collect(self) -> list[Loaded]:
        if not self.num_out:
            return []
        with self._wake:
            done, self._done = self._done, []
        self.num_out -= len(done)
        return done

    def wait(self, timeout_s: float) -> None:
        """Until something is done, or the time is up."""
        with self._wake:
            self._wake.wait_for(lambda: bool(self._done), timeout_s)

    def _save(self, profile: Profile, contents: list[Content]) -> bool:
        try:
            write_profile(self._path(profile.name), self._header(profile), contents)
        except OSError as error:
            _log.error("a profile could not be written: %s", error)
            return False
        return True

    def _load(self, profile: Profile) -> list[Content] | None:
        path = self._path(profile.name)
        try:
            return read_profile(path, self._header(profile))
        except (BadProfile, OSError) as error:
            self._report(path, error)
            return None

    def _unlink(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            _log.error("a profile's file could not be removed: %s", error)

    def _report(self, path: Path, error: Exception) -> None:
        mtime = path.stat().st_mtime_ns if path.exists() else 0
        if (path, mtime) not in self._bad:
            self._bad.add((path, mtime))
            self.num_bad += 1
            _log.warning("%s is not used: %s", path, error)

    def _header(self, profile: Profile) -> Header:
        keys = tuple(key.hex() for key in profile.keys)
        return Header(self._fingerprint, profile.tenant, profile.id, keys, self._page_bytes)

    def _path(self, name: Name) -> Path:
        return self._directory / file_name(self._fingerprint, *name)
