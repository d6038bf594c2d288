"""The API keys of a server: those of its settings, and those of a file that is read again when it changes.

A line of the file is a key and what it stands for; `#` begins a comment:

    sk-1f0c... tenant=ada priority=5 requests_per_minute=60 tokens_per_minute=100000 concurrent_requests=4

Keys are kept as digests, and never named: an error says the line.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.limits import Account, KeyLimits
from services.ranges import MAX_NAME, RANGES

log = logging.getLogger("triptych.api")

LOOK_S = 1.0
"""How often the file is looked at, at most."""
OWN_TENANTS = "key-"
"""How the tenants begin that stand for keys without a tenant of their own."""
MOST = 10**12
_LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrent_requests")


class KeyFileError(ValueError):
    """The file of keys can't be used. Says where and why, without a key."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the file."""

    digest: bytes
    tenant: str
    priority: int | None
    limits: KeyLimits


class Keyring:
    """Who a key stands for. An admin key stands for nobody: its account has no tenant. For one event loop."""

    def __init__(
        self,
        keys: Sequence[str] = (),
        admin_keys: Sequence[str] = (),
        path: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises KeyFileError for a file that can't be used."""
        self._path = path
        self._clock = clock
        self._fixed = {
            digest_of(key.encode()): Account(clock, f"{OWN_TENANTS}{number}")
            for number, key in enumerate(dict.fromkeys(key for key in keys if key))
        }
        self._admin = {digest_of(key.encode()): Account(clock) for key in admin_keys if key}
        self._listed: dict[bytes, Account] = {}
        self._accounts: dict[bytes, Account] = {}
        self._seen = _signature(path)
        self._looked = clock()
        self._take(read_file(path) if path else [])

    def __bool__(self) -> bool:
        return bool(self._accounts)

    def find(self, token: bytes) -> Account | None:
        """The account of a key, None for one that isn't known. The time it takes says nothing about the keys."""
        self._look()
        digest = digest_of(token)
        found = None
        for known, account in self._accounts.items():
            if hmac.compare_digest(digest, known):
                found = account
        return found

    def _look(self) -> None:
        """Read the file again if it has changed. One that can't be used changes nothing."""
        now = self._clock()
        if not self._path or now - self._looked < LOOK_S:
            return
        self._looked = now
        signature = _signature(self._path)
        if signature == self._seen:
            return
        self._seen = signature
        try:
            entries = read_file(self._path)
        except KeyFileError as error:
            log.error("the API keys stay as they are: %s", error)
            return
        self._take(entries)
        log.info("read %s again: %d API keys", self._path, len(entries))

    def _take(self, entries: Sequence[Entry]) -> None:
        """These are the file's keys now. A key that was there before goes on with what it has used."""
        listed: dict[bytes, Account] = {}
        for entry in entries:
            account = self._listed.get(entry.digest) or Account(self._clock)
            account.tenant, account.priority = entry.tenant, entry.priority
            account.change(entry.limits)
            listed[entry.digest] = account
        self._listed = listed
        self._accounts = {**self._fixed, **self._admin, **listed}


def digest_of(token: bytes) -> bytes:
    """What is kept and compared instead of a key."""
    return hashlib.sha256(token).digest()


def read_file(path: str) -> list[Entry]:
    """The lines of a file of keys. Raises KeyFileError; also for a file that everybody can read."""
    try:
        with open(path, encoding="utf-8") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & stat.S_IRWXO:
                raise KeyFileError(f"{path} is open to everybody on this machine (mode {mode:o}); chmod 600 it")
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise KeyFileError(f"{path} can't be read: {reason}") from None
    entries: dict[bytes, Entry] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        entry = _entry(words, f"{path}:{number}")
        if entry.digest in entries:
            raise KeyFileError(f"{path}:{number}: this key is on an earlier line too")
        entries[entry.digest] = entry
    if not entries:
        raise KeyFileError(f"{path} holds no API key")
    return list(entries.values())


def _entry(words: Sequence[str], where: str) -> Entry:
    digest = digest_of(words[0].encode())
    # Named by the key and not by its place: other lines may come and go.
    tenant = OWN_TENANTS + hashlib.sha256(digest).hexdigest()[:16]
    priority: int | None = None
    limits: dict[str, int] = {}
    for word in words[1:]:
        if word.startswith("#"):
            break
        name, equals, value = word.partition("=")
        if name == "tenant" and 0 < len(value) <= MAX_NAME and not value.startswith(OWN_TENANTS):
            tenant = value
        elif name == "priority" and equals:
            low, high = int(RANGES[name].low), int(RANGES[name].high)
            priority = _whole(value, low, high, f"{where}: {name}")
        elif name in _LIMITS and equals:
            limits[name] = _whole(value, 1, MOST, f"{where}: {name}")
        elif name == "tenant":
            raise KeyFileError(f"{where}: tenant: a name that doesn't begin with {OWN_TENANTS!r} is wanted")
        else:  # it could be part of a key with a blank in it
            raise KeyFileError(
                f"{where}: after the key, tenant, priority, {', '.join(_LIMITS)} are allowed, as name=value"
            )
    return Entry(digest, tenant, priority, KeyLimits(**limits))


def _whole(text: str, low: int, high: int, where: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise KeyFileError(f"{where}: a whole number from {low} to {high} is wanted")
    return value


def _signature(path: str) -> tuple[int, ...] | None:
    """Changes with the file, and with who may read it; None if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino
