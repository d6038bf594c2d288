"""What a config field's description accepts, refuses and prints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.settings import SettingError, check, convert, setting, specs, to_text


@dataclass(frozen=True, slots=True)
class Example:
    """One field of each kind."""

    count: int = setting(4, help="things", unit="things", minimum=1, maximum=10)
    ratio: float = setting(0.5, help="part", minimum=0.0)
    size: int = setting(0, help="memory", unit="bytes", minimum=0)
    name: str = setting("", help="a name")
    color: str = setting("red", help="a color", choices=("red", "green"))
    fast: bool = setting(False, help="hurry")
    limit: int | None = setting(None, help="a limit", minimum=0)
    keys: tuple[str, ...] = setting((), help="keys", secret=True)

    def __post_init__(self) -> None:
        check(self)


FIELDS = specs(Example)


def test_a_field_has_its_flag_and_its_variable() -> None:
    assert FIELDS["count"].flag == "--count"
    assert specs(Example)["count"].env == "TRIPTYCH_COUNT"


@pytest.mark.parametrize(
    ("name", "raw", "value"),
    [
        ("count", "7", 7),
        ("count", 7, 7),
        ("ratio", "2", 2.0),
        ("ratio", 1, 1.0),
        ("size", "2MiB", 2 * 2**20),
        ("size", "1.5GiB", 3 * 2**29),
        ("size", "100", 100),
        ("name", "none", "none"),
        ("color", "green", "green"),
        ("fast", "Yes", True),
        ("fast", "0", False),
        ("fast", True, True),
        ("limit", "none", None),
        ("limit", "3", 3),
        ("keys", "a, b,", ("a", "b")),
        ("keys", '["a,b"]', ("a,b",)),
        ("keys", ["x"], ("x",)),
    ],
)
def test_text_and_toml_values_become_the_fields_type(name: str, raw: Any, value: Any) -> None:
    got = convert(FIELDS[name], raw, "here")
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("count", "0"),
        ("count", "11"),
        ("count", "1.5"),
        ("count", 1.5),
        ("count", True),
        ("count", "none"),
        ("count", ""),
        ("ratio", "nan"),
        ("ratio", "inf"),
        ("ratio", "-0.1"),
        ("size", "2XiB"),
        ("size", "MiB"),
        ("name", 3),
        ("color", "blue"),
        ("fast", "maybe"),
        ("fast", 1),
        ("limit", "-1"),
        ("keys", "[1]"),
        ("keys", "[broken"),
        ("keys", 5),
    ],
)
def test_a_wrong_value_is_refused(name: str, raw: Any) -> None:
    with pytest.raises(SettingError, match="^there: got "):
        convert(FIELDS[name], raw, "there")


def test_the_refusal_names_the_place_the_value_and_what_is_allowed() -> None:
    with pytest.raises(SettingError) as caught:
        convert(FIELDS["count"], "99", "--count")
    assert str(caught.value) == "--count: got '99', allowed is a whole number (things) from 1 to 10"
    with pytest.raises(SettingError, match="allowed is one of red, green"):
        convert(FIELDS["color"], "blue", "--color")
    with pytest.raises(SettingError, match="at least 0, or none"):
        convert(FIELDS["limit"], "x", "--limit")


def test_a_refused_secret_is_not_repeated() -> None:
    with pytest.raises(SettingError) as caught:
        convert(FIELDS["keys"], '["hunter2"', "TRIPTYCH_KEYS")
    assert "hunter2" not in str(caught.value)


def test_a_config_made_in_code_is_checked_too() -> None:
    assert Example(count=10).count == 10
    with pytest.raises(SettingError, match="count"):
        Example(count=11)


def test_a_field_that_text_cannot_fill_is_a_programming_error() -> None:
    @dataclass(frozen=True)
    class Plain:
        count: int = 3

    @dataclass(frozen=True)
    class Odd:
        table: dict[str, int] = setting(None, help="no")

    with pytest.raises(TypeError, match=r"Plain\.count"):
        specs(Plain)
    with pytest.raises(TypeError, match=r"Odd\.table"):
        specs(Odd)


@given(st.lists(st.text()).map(tuple))
def test_lists_of_any_strings_survive_the_way_to_a_child_process(value: tuple[str, ...]) -> None:
    assert convert(FIELDS["keys"], to_text(FIELDS["keys"], value), "here") == value


@pytest.mark.parametrize(("name", "value"), [("count", 3), ("ratio", 0.1), ("fast", True), ("limit", None)])
def test_values_survive_the_way_to_a_child_process(name: str, value: Any) -> None:
    assert convert(FIELDS[name], to_text(FIELDS[name], value), "here") == value
