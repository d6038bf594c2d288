"""Where a request goes: its prefix while loads are even, the lightest load when they aren't; always the same answer."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from protocol.columns import pack_i32
from scheduler.hashing import cache_keys
from scheduler.placement import CHUNK_TOKENS, RECENT_PROMPTS, Affinity, Chosen, Placement, Rules, Standing

CAPACITY = 64 * CHUNK_TOKENS
RULES = Rules(balance_tokens=1000)


def prompt(seed: int, tokens: int) -> bytes:
    draw = random.Random(seed)
    return pack_i32([draw.randrange(50_000) for _ in range(tokens)])


def at(*loads: float, free: int = CAPACITY, capacity: int = CAPACITY) -> list[Standing]:
    return [Standing(number, load, free, capacity, 2048) for number, load in enumerate(loads)]


def choose(placement: Placement, text: bytes, standings: Sequence[Standing], **more: int) -> Chosen:
    return placement.choose(text, (), standings, **more)


def test_a_prompt_goes_where_its_prefix_was_sent_while_loads_are_even() -> None:
    placement = Placement(RULES)
    assert choose(placement, prompt(1, 640), at(500, 0)).number == 1
    again = choose(placement, prompt(1, 640) + prompt(2, 100), at(0, 900))
    assert (again.number, again.known_tokens, again.why) == (1, 640, "prefix")


def test_the_lightest_load_wins_when_loads_are_too_uneven() -> None:
    placement = Placement(RULES)
    choose(placement, prompt(1, 640), at(500, 0))
    assert choose(placement, prompt(1, 640), at(0, 1001)).why == "uneven"
    assert choose(placement, prompt(3, 640), at(0, 1001)).number == 0


def test_a_large_difference_between_large_loads_is_not_uneven() -> None:
    placement = Placement(RULES)
    choose(placement, prompt(1, 640), at(500, 0))
    assert choose(placement, prompt(1, 640), at(10_000, 12_000)).number == 1
    assert choose(placement, prompt(1, 640), at(10_000, 15_001)).number == 0


def test_without_a_bound_eight_full_steps_are_too_uneven() -> None:
    placement = Placement(Rules())
    choose(placement, prompt(1, 640), at(500, 0))
    assert choose(placement, prompt(1, 640), at(0, 8 * 2048)).number == 1
    assert choose(placement, prompt(1, 640), at(0, 8 * 2048 + 1)).number == 0


def test_a_short_match_does_not_decide() -> None:
    placement = Placement(RULES)
    choose(placement, prompt(1, CHUNK_TOKENS), at(500, 0))
    shared = prompt(1, CHUNK_TOKENS) + prompt(2, 10 * CHUNK_TOKENS)
    assert choose(placement, shared, at(0, 1)) == Chosen(0, 0, "load")


def test_of_two_matches_the_longer_one_counts_and_of_equal_ones_the_lighter_load() -> None:
    placement = Placement(RULES)
    choose(placement, prompt(1, 640), at(0, 1))
    choose(placement, prompt(1, 640) + prompt(2, 640), at(2000, 0))
    assert choose(placement, prompt(1, 640) + prompt(2, 640), at(0, 500)).number == 1
    assert choose(placement, prompt(1, 640), at(10, 11)).number == 0
    assert choose(placement, prompt(1, 640), at(11, 10)).number == 1


def test_the_prefix_gives_way_where_the_rest_of_the_prompt_has_no_room() -> None:
    full = [Standing(0, 0, CAPACITY, CAPACITY, 2048), Standing(1, 0, 99, CAPACITY, 2048)]
    for rest, expected in ((100, Chosen(0, 0, "room")), (99, Chosen(1, 640, "prefix"))):
        placement = Placement(RULES)
        choose(placement, prompt(1, 640), at(500, 0))
        assert choose(placement, prompt(1, 640) + prompt(2, rest), full) == expected


def test_a_replica_that_is_not_among_those_to_choose_from_gets_nothing() -> None:
    placement = Placement(RULES)
    choose(placement, prompt(1, 640), at(500, 0))
    assert choose(placement, prompt(1, 640), at(900)).number == 0


def test_prompts_that_share_nothing_take_turns_on_idle_replicas() -> None:
    placement = Placement(RULES)
    numbers = [choose(placement, prompt(seed, 640), at(0, 0, 0)).number for seed in range(6)]
    assert numbers == [0, 1, 2, 0, 1, 2], "each goes where the cache holds least"


def test_choices_of_one_prompt_stay_together_however_uneven_the_load_and_however_short_the_prompt() -> None:
    placement = Placement(RULES)
    assert choose(placement, prompt(1, 5), at(500, 0)).number == 1
    assert choose(placement, prompt(1, 5), at(0, 9000), choice=1) == Chosen(1, 5, "choice")
    assert choose(placement, prompt(1, 5), at(0, 9000)).number == 0, "a first choice is placed by the rule"
    assert choose(placement, prompt(2, 5), at(0, 9000), choice=1).number == 0, "one whose first choice is unknown too"
    assert choose(placement, prompt(1, 5), at(0), choice=1).number == 0, "or whose replica is gone"


def test_equal_prompts_of_different_salts_or_adapters_share_nothing() -> None:
    placement = Placement(RULES)
    placement.choose(prompt(1, 640), cache_keys("a", "", 0), at(500, 0))
    assert placement.choose(prompt(1, 640), cache_keys("b", "", 0), at(0, 1)).why == "load"
    assert placement.choose(prompt(1, 640), cache_keys("a", "", 0), at(0, 1)).number == 1


def test_what_is_not_remembered_is_looked_up_in_the_caches() -> None:
    placement, asked = Placement(RULES), []

    def ask(number: int) -> int:
        asked.append(number)
        return 600 * number

    assert placement.choose(prompt(1, 640), (), at(0, 500), ask=ask) == Chosen(1, 600, "prefix")
    assert asked == [0, 1]
    placement.choose(prompt(1, 640), (), at(0, 500), ask=ask)
    assert asked == [0, 1], "now it is remembered"
    placement.choose(prompt(1, 640), (), at(0, 500), ask=ask, ask_always=True)
    assert asked == [0, 1, 0, 1]


def test_round_robin_and_least_loaded_look_at_nothing_else() -> None:
    turns = Placement(Rules("round-robin"))
    assert [choose(turns, prompt(1, 640), at(9, 0, 5)).number for _ in range(4)] == [0, 1, 2, 0]
    without_two = at(9, 0)
    assert [choose(turns, prompt(1, 640), without_two).number for _ in range(3)] == [1, 0, 1]
    loads = Placement(Rules("least-loaded"))
    assert [choose(loads, prompt(1, 640), at(9.5, 11 - step)).number for step in range(3)] == [0, 0, 1]


def test_the_same_arrivals_go_to_the_same_places() -> None:
    def run() -> list[Chosen]:
        draw, placement, found = random.Random(7), Placement(RULES), []
        for _ in range(300):
            text = prompt(draw.randrange(9), 64 * draw.randrange(1, 4)) + prompt(draw.randrange(3), 7)
            standings = at(*(float(draw.randrange(4000)) for _ in range(3)))
            found.append(choose(placement, text, standings, choice=draw.randrange(2)))
        return found

    first = run()
    assert first == run()
    assert {chosen.why for chosen in first} >= {"prefix", "uneven", "load", "choice"}


def test_memory_is_bounded_by_the_pools_and_the_oldest_prefix_is_forgotten_first() -> None:
    affinity = Affinity()
    for seed in range(500):
        affinity.add(0, affinity.hashes(prompt(seed, 8 * CHUNK_TOKENS), ()), CAPACITY)
    assert affinity.size(0) == CAPACITY // CHUNK_TOKENS
    recent = [affinity.match(0, affinity.hashes(prompt(seed, 8 * CHUNK_TOKENS), ())) for seed in range(492, 500)]
    assert recent == [8] * 8
    assert affinity.match(0, affinity.hashes(prompt(491, 8 * CHUNK_TOKENS), ())) == 0


def test_of_a_prefix_the_end_is_forgotten_before_the_beginning() -> None:
    affinity = Affinity()
    old = affinity.hashes(prompt(1, 10 * CHUNK_TOKENS), ())
    affinity.add(0, old, 10 * CHUNK_TOKENS)
    affinity.add(0, affinity.hashes(prompt(2, 4 * CHUNK_TOKENS), ()), 10 * CHUNK_TOKENS)
    assert affinity.match(0, old) == 6


def test_prompts_that_are_remembered_for_their_choices_are_bounded_too() -> None:
    placement = Placement(RULES)
    for seed in range(RECENT_PROMPTS + 10):
        choose(placement, pack_i32([seed]), at(1, 0))
    assert len(placement._latest) == RECENT_PROMPTS


def test_what_a_runner_lost_is_forgotten() -> None:
    placement = Placement(RULES)
    choose(placement, prompt(1, 640), at(500, 0))
    placement.affinity.forget(1)
    assert choose(placement, prompt(1, 640), at(0, 500)).why == "load"


@pytest.mark.parametrize("tokens", [0, 1, CHUNK_TOKENS - 1, CHUNK_TOKENS, CHUNK_TOKENS + 1, 5 * CHUNK_TOKENS])
def test_a_prompt_costs_one_digest_for_each_whole_piece(tokens: int) -> None:
    assert len(Affinity().hashes(prompt(1, tokens), ())) == tokens // CHUNK_TOKENS
