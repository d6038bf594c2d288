"""The file of API keys: what its lines may say, what is refused without naming a key, and that changes count."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from services.keys import LOOK_S, KeyFileError, Keyring, read_file
from services.limits import KeyLimits


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o600)
    return path


def test_a_line_says_what_its_key_stands_for(tmp_path: Path) -> None:
    path = write(
        tmp_path / "keys",
        "# ours\nsk-a\n\n  sk-b tenant=ada priority=-5 requests_per_minute=60 tokens_per_minute=9000 "
        "concurrent_requests=4  # Ada's\n",
    )
    plain, rich = read_file(str(path))
    assert (plain.priority, plain.limits) == (None, KeyLimits())
    assert plain.tenant.startswith("key-")
    assert (rich.tenant, rich.priority, rich.limits) == ("ada", -5, KeyLimits(60, 9000, 4))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("# none\n", "holds no API key"),
        ("sk-secret rpm=5\n", "keys:1: after the key"),
        ("sk-secret more words\n", "keys:1: after the key"),
        ("sk-secret requests_per_minute=0\n", "keys:1: requests_per_minute: a whole number from 1"),
        ("sk-secret tokens_per_minute=many\n", "keys:1: tokens_per_minute"),
        ("sk-secret priority=4294967296\n", "keys:1: priority"),
        ("sk-secret tenant=\n", "keys:1: tenant"),
        ("sk-secret tenant=key-0\n", "keys:1: tenant"),
        ("sk-secret\nsk-other\nsk-secret tenant=x\n", "keys:3: this key is on an earlier line"),
    ],
)
def test_what_a_line_may_not_say_is_refused_without_naming_the_key(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(KeyFileError, match=why) as refused:
        read_file(str(write(tmp_path / "keys", text)))
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o644])
def test_a_file_that_everybody_can_open_is_refused(tmp_path: Path, mode: int) -> None:
    path = write(tmp_path / "keys", "sk-a\n")
    path.chmod(mode)
    with pytest.raises(KeyFileError, match=f"open to everybody .*mode {mode:o}"):
        Keyring(path=str(path))
    path.chmod(0o640)
    assert Keyring(path=str(path))


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="can't be read: No such file"):
        Keyring(path=str(tmp_path / "nowhere"))
    (tmp_path / "odd").write_bytes(b"\xff\xfe")
    (tmp_path / "odd").chmod(0o600)
    with pytest.raises(KeyFileError, match="not UTF-8"):
        Keyring(path=str(tmp_path / "odd"))


def test_keys_come_from_settings_and_from_the_file_whose_lines_count_for_both(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", "sk-b tenant=b requests_per_minute=1\nsk-root tenant=r\n")
    keyring = Keyring(["sk-a", "", "sk-b"], ["sk-root", "sk-admin"], str(path))
    found = {key: keyring.find(key.encode()) for key in ("sk-a", "sk-b", "sk-root", "sk-admin", "", "sk-c")}
    tenants = {key: account.tenant if account is not None else None for key, account in found.items()}
    assert tenants == {"sk-a": "key-0", "sk-b": "b", "sk-root": "r", "sk-admin": "", "": None, "sk-c": None}


def test_a_changed_file_is_read_again_and_what_was_used_still_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "triptych.api")
    clock = Clock()
    path = write(tmp_path / "keys", "sk-old\nsk-ada tenant=ada requests_per_minute=2\n")
    keyring = Keyring(path=str(path), clock=clock)
    ada = keyring.find(b"sk-ada")
    assert ada is not None
    ada.enter()
    write(path, "sk-new\nsk-ada tenant=ada priority=3 requests_per_minute=3\n")
    assert keyring.find(b"sk-new") is None  # it is looked at once a second
    clock.now += LOOK_S
    new = keyring.find(b"sk-new")
    assert new is not None
    assert keyring.find(b"sk-old") is None
    assert keyring.find(b"sk-ada") is ada
    assert (ada.priority, ada.live) == (3, 1)
    assert ada.headers()["x-ratelimit-limit-requests"] == "3"
    assert ada.headers()["x-ratelimit-remaining-requests"] == "2"
    assert "2 API keys" in caplog.text
    assert "sk-" not in caplog.text


def test_a_file_that_was_broken_or_removed_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    path = write(tmp_path / "keys", "sk-a tenant=a\n")
    keyring = Keyring(path=str(path), clock=clock)
    write(path, "sk-b tenant=\n")
    clock.now += LOOK_S
    assert keyring.find(b"sk-a") is not None
    assert keyring.find(b"sk-b") is None
    os.unlink(path)
    clock.now += LOOK_S
    assert keyring.find(b"sk-a") is not None
    assert caplog.text.count("the API keys stay as they are") == 2
    write(path, "sk-b tenant=b\n")
    clock.now += LOOK_S
    assert keyring.find(b"sk-a") is None
    assert keyring.find(b"sk-b") is not None


def test_a_file_that_was_open_to_everybody_is_read_once_it_no_longer_is(tmp_path: Path) -> None:
    clock = Clock()
    path = write(tmp_path / "keys", "sk-a tenant=a\n")
    keyring = Keyring(path=str(path), clock=clock)
    write(path, "sk-b tenant=b\n").chmod(0o644)
    clock.now += LOOK_S
    assert keyring.find(b"sk-b") is None
    path.chmod(0o600)
    clock.now += LOOK_S
    assert keyring.find(b"sk-b") is not None


def test_a_key_without_a_tenant_keeps_its_own_when_other_lines_come_and_go(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", "sk-a\nsk-b\n")
    before = {entry.digest: entry.tenant for entry in read_file(str(path))}
    write(path, "sk-0\nsk-b\n")
    after = {entry.digest: entry.tenant for entry in read_file(str(path))}
    (same,) = before.keys() & after.keys()
    assert before[same] == after[same]
    assert len({*before.values(), *after.values()}) == 3
