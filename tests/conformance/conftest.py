"""Which schedulers are judged, and the chains that the cases use.

`pytest tests/conformance --scheduler "python my_scheduler.py"` judges yours; `--scheduler-lacks` names what it
doesn't do, and those cases are skipped with that reason.
"""

from __future__ import annotations

import shlex
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.chain import CAPABILITIES, SUBJECTS, Chain, Subject

PASSED = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--scheduler", help="command line of a scheduler to judge instead of the ones in this tree")
    parser.addoption(
        "--scheduler-lacks", default="", help=f"what it can't do, comma-separated: {', '.join(CAPABILITIES)}"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(capability, ...): skipped for a scheduler that lacks one of these")
    unknown = set(lacked(config)) - set(CAPABILITIES)
    if unknown:
        raise pytest.UsageError(f"--scheduler-lacks: {', '.join(sorted(unknown))}; there are {', '.join(CAPABILITIES)}")


def lacked(config: pytest.Config) -> list[str]:
    """What the command line says that the scheduler can't do."""
    return [name.strip() for name in config.getoption("--scheduler-lacks", "").split(",") if name.strip()]


def subjects(config: pytest.Config) -> list[Subject]:
    """The schedulers to judge, as the command line asks."""
    command = config.getoption("--scheduler", None)
    if not command:
        return list(SUBJECTS)
    reasons = dict.fromkeys(lacked(config), "declared with --scheduler-lacks")
    return [Subject("yours", tuple(shlex.split(command)), lacks=reasons)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "subject" in metafunc.fixturenames:
        found = subjects(metafunc.config)
        metafunc.parametrize("subject", found, ids=[subject.name for subject in found], scope="session", indirect=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.when == "call":
        item.stash[PASSED] = report.passed
    return report


@pytest.fixture(scope="session")
def subject(request: pytest.FixtureRequest) -> Subject:
    """The scheduler under test."""
    found: Subject = request.param
    return found


@pytest.fixture(autouse=True)
def _skip_what_it_lacks(request: pytest.FixtureRequest) -> None:
    for marker in request.node.iter_markers("needs"):
        lacks = request.getfixturevalue("subject").lacks
        for capability in marker.args:
            assert capability in CAPABILITIES, capability
            if capability in lacks:
                pytest.skip(f"{capability} ({CAPABILITIES[capability]}): {lacks[capability]}")


class _Shared:
    """One running process for many cases: a case that fails takes it along."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._chain: Chain | None = None
        self._directory = Path()

    def get(self) -> Chain:
        if self._chain is not None and (self._chain.process is None or self._chain.process.poll() is not None):
            self.discard()
        if self._chain is None:
            self._directory = Path(tempfile.mkdtemp(prefix="tt-", dir="/tmp"))
            self._chain = Chain(self._subject, self._directory)
        return self._chain

    def discard(self) -> None:
        if self._chain is not None:
            self._chain.close()
            shutil.rmtree(self._directory, ignore_errors=True)
            self._chain = None


@pytest.fixture(scope="session")
def shared(subject: Subject) -> Iterator[_Shared]:
    """The process that cases share."""
    holder = _Shared(subject)
    yield holder
    holder.discard()


@pytest.fixture
def chain(shared: _Shared, request: pytest.FixtureRequest) -> Iterator[Chain]:
    """A chain whose process has served other cases. It must be idle afterwards, which is checked."""
    found = shared.get()
    yield found
    if not request.node.stash.get(PASSED, False):
        shared.discard()
        return
    try:
        found.check_idle()
    except AssertionError:
        shared.discard()
        raise


@pytest.fixture
def fresh_chain(subject: Subject, runtime_dir: Path) -> Iterator[Chain]:
    """A chain of which nothing is started yet."""
    found = Chain(subject, runtime_dir)
    yield found
    found.close()
