"""API keys: which tenant a request belongs to. The same answer, in the same time, for every kind of wrong key."""

import hashlib
import hmac

from serving.config import ApiKey
from serving.errors import Unauthorized

DEFAULT_TENANT = "default"


class Authenticator:
    """Knows hashes of keys only."""

    def __init__(self, keys: tuple[ApiKey, ...]) -> None:
        """Without keys every request belongs to DEFAULT_TENANT."""
        self._keys = tuple((bytes.fromhex(key.sha256), key.tenant) for key in keys)

    @property
    def required(self) -> bool:
        return bool(self._keys)

    def tenant(self, authorization: str | None) -> str:
        """The tenant of an Authorization header. Raises Unauthorized, the same for missing, malformed and wrong."""
        if not self._keys:
            return DEFAULT_TENANT
        scheme, _, key = (authorization or "").partition(" ")
        # Headers may hold any bytes, which arrive as lone surrogates: hash them all, refuse none early.
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found: str | None = None
        for known, tenant in self._keys:  # all of them: the time must not tell which one came close
            if hmac.compare_digest(digest, known):
                found = tenant
        if found is None or scheme.lower() != "bearer":
            raise self.refusal()
        return found

    @staticmethod
    def refusal() -> Unauthorized:
        return Unauthorized("a valid API key is needed: send the header Authorization: Bearer KEY")
