"""The process that tries grammars: what costs it its life is refused, and the next one is tried by another."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import psutil
import pytest

from services.errors import ApiError
from services.grammar_checker import GrammarChecker
from services.structured import Form

SLOW = json.dumps({"type": "integer", "multipleOf": 1_000_003})  # many seconds, and a state for each remainder
DEEP = "start: a0\n" + "\n".join(f'a{n}: a{n + 1} "x"' for n in range(4000)) + '\na4000: "x"'


@pytest.fixture
def checker() -> Iterator[GrammarChecker]:
    made = GrammarChecker(check_s=1.0)
    yield made
    made.close()


def check(checker: GrammarChecker, *forms: tuple[str, str]) -> list[str]:
    """The grammar of each, or what is wrong with it; all are asked at once."""

    async def one(kind: str, text: str) -> str:
        try:
            return await checker.check(Form(kind, text, "field"))
        except ApiError as error:
            assert (error.status, error.param, error.code) == (400, "field", "invalid_grammar")
            return error.message

    async def all_() -> list[str]:
        return list(await asyncio.gather(*(one(*form) for form in forms)))

    return asyncio.run(all_())


def pid(checker: GrammarChecker) -> int:
    assert checker._worker is not None
    return checker._worker.pid


@pytest.mark.parametrize(("kind", "text"), [("json_schema", SLOW), ("grammar", DEEP)], ids=["slow", "deep"])
def test_a_grammar_that_ends_its_check_is_refused_and_others_are_not(
    checker: GrammarChecker, kind: str, text: str
) -> None:
    hostile, after = check(checker, (kind, text), ("regex", "a+"))
    assert hostile == "field: compiling it takes too long or too much memory"
    assert after == "regex:a+"


def test_what_is_known_is_not_tried_again(checker: GrammarChecker) -> None:
    forms = ("regex", "a+"), ("regex", "(a")
    told = check(checker, *forms)
    first = pid(checker)
    assert checker._worker is not None
    checker._worker.kill()
    checker._worker.wait()
    assert check(checker, *forms) == told and "unclosed" in told[1]
    assert pid(checker) == first
    assert check(checker, ("regex", "b+")) == ["regex:b+"]
    assert pid(checker) != first


def test_answers_belong_to_their_questions(checker: GrammarChecker) -> None:
    forms = [("regex", f"a{{{number}}}") for number in range(1, 40)]
    assert check(checker, *forms) == [f"regex:{text}" for _, text in forms]


def test_the_process_ends_with_its_checker() -> None:
    checker = GrammarChecker()
    assert check(checker, ("regex", "a")) == ["regex:a"]
    worker = psutil.Process(pid(checker))
    checker.close()
    assert not worker.is_running()


def test_a_worker_that_was_killed_for_another_reason_says_nothing_about_the_grammar(checker: GrammarChecker) -> None:
    check(checker, ("regex", "a"))
    worker = psutil.Process(pid(checker))
    worker.suspend()  # it looks like one that computes for ever
    (refused,) = check(checker, ("regex", "b+"))
    assert "too long" in refused
    assert check(checker, ("regex", "b+")) == ["regex:b+"]


def test_an_end_does_not_wait_for_a_check() -> None:
    checker = GrammarChecker(check_s=3600.0)
    check(checker, ("regex", "a"))
    psutil.Process(pid(checker)).suspend()

    async def both() -> None:
        checking = asyncio.ensure_future(checker.check(Form("regex", "b", "field")))
        asyncio.get_running_loop().call_soon(checker.close)
        with pytest.raises(ApiError):
            await checking

    asyncio.run(both())


def test_a_checker_that_was_never_asked_starts_no_process() -> None:
    checker = GrammarChecker()
    checker.close()
    assert checker._worker is None
