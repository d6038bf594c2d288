"""What a client asks for in the query of a kept response's address: its events, or a page of its input items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.errors import invalid
from services.responses.items import JsonItem

DEFAULT_PAGE, MAX_PAGE = 20, 100
MAX_EVENT = 10**9 - 1
ORDERS = ("asc", "desc")
FLAGS = {"false": False, "true": True, "0": False, "1": True}


def flag(query: Mapping[str, str], name: str) -> bool:
    """Whether a flag is set. ApiError 400 for a value that is neither."""
    text = query.get(name, "false")
    if text.lower() not in FLAGS:
        raise invalid(f"{name}: {text[:40]!r}, allowed are {', '.join(FLAGS)}", name)
    return FLAGS[text.lower()]


def starting_after(query: Mapping[str, str]) -> int | None:
    """The number of the last event that is known; None if none is named. ApiError 400 for what is no number."""
    text = query.get("starting_after")
    return None if text is None else _whole_number(text, "starting_after", 0, MAX_EVENT)


def page_of(all_items: Sequence[JsonItem], query: Mapping[str, str]) -> dict[str, Any]:
    """OpenAI's list for `limit`, `order` and `after`. ApiError 400 for a value that isn't one."""
    limit = _limit(query)
    items = list(all_items)
    if _order(query) == "desc":
        items.reverse()
    after = query.get("after")
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise invalid(f"after: there is no item {after[:100]!r}", "after")
        items = items[ids.index(after) + 1 :]
    page = items[:limit]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"object": "list", "data": page, **ends, "has_more": len(items) > limit}


def check(query: Mapping[str, str]) -> None:
    """ApiError 400 for what is wrong whatever there is to list."""
    _limit(query)
    _order(query)


def _order(query: Mapping[str, str]) -> str:
    order = query.get("order", ORDERS[-1])
    if order not in ORDERS:
        raise invalid(f"order: {order[:40]!r}, allowed are 'asc' and 'desc'", "order")
    return order


def _limit(query: Mapping[str, str]) -> int:
    text = query.get("limit")
    return DEFAULT_PAGE if text is None else _whole_number(text, "limit", 1, MAX_PAGE)


def _whole_number(text: str, param: str, low: int, high: int) -> int:
    # More digits than the largest has can't be right, and enough of them make `int` raise.
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(high)) and low <= int(text) <= high):
        raise invalid(f"{param}: {text[:40]!r} is not a whole number from {low} to {high}", param, "out_of_range")
    return int(text)
