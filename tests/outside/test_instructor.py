"""instructor: objects out of answers, by calls and by schemas, whole, partial and as a list."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from place import MODEL, Place

instructor = pytest.importorskip("instructor")
import openai  # noqa: E402
from pydantic import BaseModel, ConfigDict, Field  # noqa: E402

CLIENTS = ("instructor", "openai")
ASK: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Ada is 36 years old. Who is it?"}],
    "temperature": 0,
    "max_tokens": 200,
    "max_retries": 0,
}
MODES = pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"])


class Person(BaseModel):
    """A person."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=99)


def client(server: Place, mode: str, kind: Any = openai.OpenAI) -> Any:
    """The patched client in one of its modes."""
    return instructor.from_openai(
        kind(base_url=server.base, api_key="none", max_retries=0), mode=getattr(instructor.Mode, mode)
    )


@MODES
def test_an_answer_is_an_object(server: Place, mode: str) -> None:
    person = client(server, mode).chat.completions.create(response_model=Person, **ASK)
    assert isinstance(person, Person)


@MODES
def test_a_stream_is_an_object_that_grows(server: Place, mode: str) -> None:
    pieces = list(client(server, mode).chat.completions.create_partial(response_model=Person, **ASK))
    assert len(pieces) > 2 and pieces[-1].age is not None and pieces[-1].name


def test_the_asynchronous_client_and_many_at_once(server: Place) -> None:
    async def main() -> list[Any]:
        asked = client(server, "TOOLS", openai.AsyncOpenAI)
        return await asyncio.gather(*[asked.chat.completions.create(response_model=Person, **ASK) for _ in range(4)])

    assert all(isinstance(person, Person) for person in asyncio.run(main()))
