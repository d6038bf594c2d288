"""`truncation: "auto"`: how a conversation that is too long is cut, from its beginning."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from services.errors import ApiError
from services.responses.items import JsonItem

TOO_LONG = "context_length_exceeded"

T = TypeVar("T")


def droppable(items: Sequence[JsonItem]) -> list[list[int]]:
    """The places of the items that may go, in the order in which they do. What belongs together goes together.

    System messages stay, and so does the last thing that was said.
    """
    groups: list[list[int]] = []
    calls: dict[str, list[int]] = {}
    thoughts: list[int] = []
    for place, item in enumerate(items):
        kind = item["type"]
        if kind == "message" and item.get("role") in ("system", "developer"):
            continue
        if kind == "reasoning":
            thoughts.append(place)
            continue
        if kind.endswith("_output") and (group := calls.get(str(item.get("call_id")))) is not None:
            group.append(place)
            continue
        groups.append([*thoughts, place])
        thoughts = []
        if kind.endswith("_call"):
            calls[str(item.get("call_id"))] = groups[-1]
    last = max((group[-1] for group in groups), default=-1)
    return [group for group in groups if group[-1] != last]


async def fitted(items: Sequence[JsonItem], use: Callable[[list[JsonItem]], Awaitable[T]]) -> T:
    """What `use` makes of as many of the items as fit. Raises what it raises for the least that is left of them."""

    async def without(count: int) -> T | ApiError:
        gone = {place for group in groups[:count] for place in group}
        try:
            return await use([item for place, item in enumerate(items) if place not in gone])
        except ApiError as error:
            # A template may also refuse what a cut leaves, such as a conversation that begins with an answer.
            too_much = error.code == TOO_LONG or (count > 0 and error.status == 400)
            if not too_much or count == len(groups):
                raise
            return error

    groups = droppable(items)
    made = await without(0)
    if not isinstance(made, ApiError):
        return made
    low, high = 1, len(groups)
    made = await without(high)
    while low < high:
        middle = (low + high) // 2
        tried = await without(middle)
        if isinstance(tried, ApiError):
            low = middle + 1
        else:
            made, high = tried, middle
    assert not isinstance(made, ApiError)
    return made
