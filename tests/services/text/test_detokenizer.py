"""Incremental text: equal to decoding at once, whole characters only, stops across token borders."""

from __future__ import annotations

import codecs
import random
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest

from services.text import detokenizer as detokenizer_module
from services.text.detokenizer import Delta, Detokenizer
from services.text.tokenizer import Tokenizer

FAMILIES = ("byte-level", "byte-fallback", "metaspace")
HARD_TEXT = "é漢👩‍💻🇫🇷"


def stream(detokenizer: Detokenizer, ids: Sequence[int], size: int = 1) -> list[str]:
    deltas = [detokenizer.push(ids[at : at + size]).text for at in range(0, len(ids), size)]
    return [*deltas, detokenizer.finish()]


def compositions(items: list[int], longest: int) -> Iterator[list[list[int]]]:
    if not items:
        yield []
    for size in range(1, min(longest, len(items)) + 1):
        for rest in compositions(items[size:], longest):
            yield [items[:size], *rest]


def byte_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The text as one token per byte."""
    by_bytes = {tokenizer.token_bytes(index): index for index in reversed(range(tokenizer.vocab_size))}
    return [by_bytes[bytes([byte])] for byte in text.encode()]


def random_ids(rng: random.Random, tokenizer: Tokenizer) -> list[int]:
    return [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randint(1, 20))]


@pytest.mark.parametrize("family", FAMILIES)
def test_joined_deltas_equal_decoding_at_once_for_random_ids(families: dict[str, Tokenizer], family: str) -> None:
    tokenizer, rng = families[family], random.Random(family)
    for _ in range(1000):
        ids, skip = random_ids(rng, tokenizer), rng.random() < 0.5
        deltas = stream(Detokenizer(tokenizer, skip_special_tokens=skip), ids, rng.randint(1, 3))
        assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_at_once_equals_the_librarys_decoding(families: dict[str, Tokenizer], family: str) -> None:
    tokenizer, rng = families[family], random.Random(family)
    for _ in range(1000):
        ids = random_ids(rng, tokenizer)
        if family == "byte-fallback":  # it replaces a whole run of bytes if one is broken: leave valid runs only
            ids = [index for index in ids if not (tokenizer.id_to_token(index) or "").startswith("<0x")]
            ids += byte_ids(tokenizer, rng.choice(HARD_TEXT))
        skip = rng.random() < 0.5
        expected = tokenizer._backend.decode(ids, skip_special_tokens=skip)
        assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_an_output_after_a_prompt_goes_on_from_it(families: dict[str, Tokenizer], family: str) -> None:
    tokenizer, rng = families[family], random.Random(family)
    for _ in range(1000):
        prompt, ids = random_ids(rng, tokenizer), random_ids(rng, tokenizer)
        before = tokenizer.decode(prompt)
        if before.endswith("\ufffd"):
            continue  # an incomplete character at the border: its own test below
        deltas = stream(Detokenizer(tokenizer, prompt_ids=prompt), ids)
        assert before + "".join(deltas) == tokenizer.decode(prompt + ids)


def test_no_delta_holds_a_replacement_character_for_any_split_of_a_hard_text(smollm2: Tokenizer) -> None:
    ids = smollm2.encode(HARD_TEXT[:3])
    for split in compositions(ids, 4):
        detokenizer = Detokenizer(smollm2)
        deltas = [detokenizer.push(part).text for part in split]
        assert "".join(deltas) == HARD_TEXT[:3]
        assert detokenizer.finish() == ""


@pytest.mark.parametrize("family", ["byte-fallback"])
def test_bytes_one_by_one_make_whole_characters(families: dict[str, Tokenizer], family: str) -> None:
    deltas = stream(Detokenizer(families[family]), byte_ids(families[family], HARD_TEXT))
    assert [delta for delta in deltas if delta] == list(HARD_TEXT)


def test_real_tokens_of_a_hard_text_come_as_whole_characters(smollm2: Tokenizer) -> None:
    deltas = stream(Detokenizer(smollm2), smollm2.encode(HARD_TEXT))
    assert "".join(deltas) == HARD_TEXT
    assert not any("\ufffd" in delta for delta in deltas)


def test_an_output_cut_inside_a_character_flushes_one_replacement_once(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("漢")
    assert len(ids) > 1
    detokenizer = Detokenizer(smollm2)
    assert detokenizer.push(ids[:-1]).text == ""
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""
    assert detokenizer.text == "\ufffd" == smollm2.decode(ids[:-1])


def test_broken_bytes_are_given_up_as_soon_as_they_are_broken(byte_fallback: Tokenizer) -> None:
    broken = [byte_fallback.token_to_id("<0xF0>"), byte_fallback.token_to_id("a"), byte_fallback.token_to_id("<0x80>")]
    ids = [index for index in broken if index is not None]
    assert stream(Detokenizer(byte_fallback), ids) == ["", "\ufffda", "\ufffd", ""]


def test_interleaved_outputs_keep_their_own_halves(smollm2: Tokenizer) -> None:
    first, second = smollm2.encode("漢字"), smollm2.encode("🇫🇷")
    a, b = Detokenizer(smollm2), Detokenizer(smollm2)
    for left, right in zip(first, second, strict=False):
        a.push([left])
        b.push([right])
    a.push(first[len(second) :])
    b.push(second[len(first) :])
    a.finish()
    b.finish()
    assert (a.text, b.text) == ("漢字", "🇫🇷")


@pytest.mark.parametrize("text", [" a    b", "    .", "Hello , world !", " .", "  two spaces", "a \n b"])
def test_spaces_and_punctuation_survive_in_increments(smollm2: Tokenizer, text: str) -> None:
    assert "".join(stream(Detokenizer(smollm2), smollm2.encode(text))) == text


def test_a_first_sentencepiece_token_keeps_its_space_after_a_prompt(byte_fallback: Tokenizer) -> None:
    hi = [byte_fallback.token_to_id("▁Hi") or 0]
    prompt = [1, byte_fallback.token_to_id("a") or 0]
    assert stream(Detokenizer(byte_fallback), hi) == ["Hi", ""]
    assert stream(Detokenizer(byte_fallback, prompt_ids=prompt), hi) == [" Hi", ""]
    # A prompt of skipped special tokens has no text: the output begins one.
    assert stream(Detokenizer(byte_fallback, prompt_ids=[1]), hi) == ["Hi", ""]


def test_a_character_that_the_prompt_began_belongs_to_the_output(byte_fallback: Tokenizer) -> None:
    ids = byte_ids(byte_fallback, "a漢")
    assert "".join(stream(Detokenizer(byte_fallback, prompt_ids=ids[:2]), ids[2:])) == "漢"


def test_a_prompt_that_ends_in_broken_bytes_adds_nothing_to_the_output(byte_fallback: Tokenizer) -> None:
    ids = byte_ids(byte_fallback, "a漢")
    a = [byte_fallback.token_to_id("a") or 0]
    assert "".join(stream(Detokenizer(byte_fallback, prompt_ids=ids[:2]), a)) == "a"


def test_special_tokens_are_skipped_or_shown(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("a<|im_end|>b")
    assert "".join(stream(Detokenizer(smollm2), ids)) == "ab"
    assert "".join(stream(Detokenizer(smollm2, skip_special_tokens=False), ids)) == "a<|im_end|>b"


def test_a_stop_is_found_across_tokens_and_after_an_emoji(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("hi 👩‍💻\n\nUser: no")
    for size in (1, 2, 3, len(ids)):
        detokenizer = Detokenizer(smollm2, stop=["\n\nUser:"])
        deltas = [detokenizer.push(ids[at : at + size]) for at in range(0, len(ids), size)]
        assert "".join(delta.text for delta in deltas) == "hi 👩‍💻" == detokenizer.text
        assert detokenizer.stopped == "\n\nUser:" == deltas[-1].stopped
        assert detokenizer.finish() == ""


def test_a_near_miss_loses_nothing(smollm2: Tokenizer) -> None:
    text = "ok\n\nUse it\n\nUs"
    assert "".join(stream(Detokenizer(smollm2, stop=["\n\nUser:"]), smollm2.encode(text))) == text


def test_tokens_are_counted_up_to_the_one_that_completed_the_stop(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("one two three four")
    detokenizer = Detokenizer(smollm2, stop=["three"])
    assert detokenizer.push(ids) == Delta("one two ", "three", 3)
    assert detokenizer.token_count == 3
    assert detokenizer.push(ids) == Delta("", "three", 0)
    assert detokenizer.token_count == 3


def test_a_stop_is_kept_when_asked_for_and_the_rest_is_cut(smollm2: Tokenizer) -> None:
    detokenizer = Detokenizer(smollm2, stop=["thr"], include_stop=True)
    assert detokenizer.push(smollm2.encode("two three four")).text == "two thr"


@pytest.mark.parametrize(("min_tokens", "text"), [(0, ""), (1, "a"), (2, "aa"), (5, "aaaa")])
def test_a_stop_does_not_fire_within_min_tokens(byte_fallback: Tokenizer, min_tokens: int, text: str) -> None:
    a = byte_fallback.token_to_id("a") or 0
    detokenizer = Detokenizer(byte_fallback, stop=["a"], min_tokens=min_tokens)
    deltas = [detokenizer.push([a]).text for _ in range(4)]
    assert "".join(deltas) + detokenizer.finish() == text


def test_tokens_are_reported_with_the_delta_that_carries_their_text(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("ok 漢 one two")
    detokenizer = Detokenizer(smollm2, stop=[" one two!"])
    reported, shown = 0, ""
    for count, index in enumerate(ids, start=1):
        delta = detokenizer.push([index])
        reported, shown = reported + delta.tokens, shown + delta.text
        assert reported <= count
        assert shown.startswith(smollm2.decode(ids[:reported]).rstrip("\ufffd"))
    assert reported < len(ids)
    assert shown + detokenizer.finish() == "ok 漢 one two"


def test_a_finished_output_takes_no_more_tokens(smollm2: Tokenizer) -> None:
    detokenizer = Detokenizer(smollm2)
    detokenizer.finish()
    with pytest.raises(RuntimeError):
        detokenizer.push([5])


class Counting:
    """A tokenizer that counts what is asked of it, and the bytes that are decoded with it."""

    def __init__(self, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
        self._tokenizer = tokenizer
        self.work = 0
        decoders = codecs.getincrementaldecoder("utf-8")

        def counted(errors: str) -> codecs.IncrementalDecoder:
            decoder = decoders(errors)
            decode = decoder.decode
            decoder.decode = lambda data, final=False: self._count(len(data), decode(data, final))  # type: ignore
            return decoder

        monkeypatch.setattr(detokenizer_module, "_utf8", counted)

    def _count(self, work: int, result: Any) -> Any:
        self.work += work
        return result

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._tokenizer, name)
        return (lambda token: self._count(1, found(token))) if callable(found) else found


@pytest.mark.parametrize("stop", [(), ("never said", "\n\nUser:")])
def test_the_work_for_a_token_is_the_same_after_few_and_after_very_many(
    smollm2: Tokenizer, monkeypatch: pytest.MonkeyPatch, stop: tuple[str, ...]
) -> None:
    counting = Counting(smollm2, monkeypatch)
    detokenizer = Detokenizer(cast(Tokenizer, counting), stop=stop)
    ids = smollm2.encode(f"Never mind: {HARD_TEXT} is", add_special_tokens=False)
    text = detokenizer.push(ids).text  # the first token of all may differ
    spent = []
    for _ in range(400):
        before = counting.work
        text += detokenizer.push(ids).text
        spent.append(counting.work - before)
    assert set(spent) == {spent[0]} and spent[0] <= 6 * len(ids)
    assert (text + detokenizer.finish()).endswith(f"{HARD_TEXT} is")


def test_most_tokens_are_looked_up_and_not_decoded(smollm2: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    counting = Counting(smollm2, monkeypatch)
    detokenizer = Detokenizer(cast(Tokenizer, counting))
    ids = smollm2.encode("The capital of France is Paris.", add_special_tokens=False)
    detokenizer.push(ids)
    before = counting.work
    detokenizer.push(ids)
    assert counting.work - before == len(ids)


def test_what_is_kept_between_tokens_does_not_grow_with_invalid_bytes(byte_fallback: Tokenizer) -> None:
    lone = byte_fallback.token_to_id("<0x80>") or 0
    detokenizer = Detokenizer(byte_fallback)
    for _ in range(50):
        assert detokenizer.push([lone]) == Delta("\ufffd", None, 1)
