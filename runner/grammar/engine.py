"""Compiles grammars beside the steps, and keeps those that were asked for last. llguidance does the work.

It is loaded with the model's vocabulary, in a thread, once a first grammar may come: a runner without it serves all
other requests. Its errors come by return value, never as exceptions.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Self

from protocol.grammar import LIMITS, lark
from protocol.messages import CompileGrammar, GrammarStatus
from runner.grammar.vocabulary import Vocabulary, VocabularyError, load_vocabulary

log = logging.getLogger("triptych.runner")

THREADS = 2
KEPT = 128
KEPT_CHARACTERS = 4 << 20
"""Grammars that stay compiled: so many, and with texts of so many characters together, but always the latest."""


class GrammarError(ValueError):
    """A grammar can't be compiled, or not for this model. The message is for the client."""


class Grammars:
    """The compiled grammars of one runner. `load` reads the vocabulary; what it raises is every grammar's error."""

    def __init__(self, load: Callable[[], Vocabulary]) -> None:
        self._load = load
        self._threads = ThreadPoolExecutor(THREADS, "grammar")
        self._loading = threading.Lock()
        self._tokenizer: Any = None
        self._why = ""
        self._kept: OrderedDict[str, Any] = OrderedDict()
        self._keeping = threading.Lock()

    @classmethod
    def of_model(cls, path: Path, vocab_size: int, *, soon: bool) -> Self:
        """For a GGUF file or a Hugging Face directory. `soon`: load now, so that the first grammar needn't wait."""
        grammars = cls(partial(load_vocabulary, path, vocab_size))
        if soon:
            grammars._threads.submit(grammars._loaded)
        return grammars

    def answer(self, errand: CompileGrammar) -> Future[GrammarStatus]:
        """The status, once the grammar is compiled."""
        return self._threads.submit(self._status, errand)

    def matcher(self, grammar: str) -> Any:
        """A new `LLMatcher` at the beginning of this grammar. GrammarError if it can't be compiled.

        At once if the grammar is among those that are kept, else after compiling it.
        """
        with self._keeping:
            kept = self._kept.get(grammar)
            if kept is not None:
                self._kept.move_to_end(grammar)
        if kept is None:
            kept = self._compile(grammar)
            self._keep(grammar, kept)
        return kept.deep_copy()

    def drop(self, grammar: str) -> None:
        """Compile it anew when it is asked for next: the states that its texts lead to are shared, and their number is
        limited, so that what many texts have used may be full."""
        with self._keeping:
            self._kept.pop(grammar, None)

    def _status(self, errand: CompileGrammar) -> GrammarStatus:
        try:
            self.matcher(errand.grammar)
        except GrammarError as error:
            return GrammarStatus(errand.id, str(error))
        except BaseException as error:  # a panic in the engine is no Exception, and its request must not wait for ever
            log.exception("a grammar broke its compiler")
            return GrammarStatus(errand.id, f"the grammar can't be compiled: {type(error).__name__}")
        return GrammarStatus(errand.id)

    def _compile(self, grammar: str) -> Any:
        tokenizer = self._loaded()
        if tokenizer is None:
            raise GrammarError(f"this runner compiles no grammars: {self._why}")
        from llguidance import LLMatcher, LLParserLimits

        try:
            text = lark(grammar)
        except ValueError as error:
            raise GrammarError(str(error)) from error
        limits = LLParserLimits(verbose_errors=False, **LIMITS)  # type: ignore[arg-type]  # all of them are numbers
        matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(text), log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first one takes up to 30 ms; copies share what it has found
        if matcher.is_error():
            raise GrammarError(problem(matcher))
        return matcher

    def _keep(self, grammar: str, matcher: Any) -> None:
        with self._keeping:
            self._kept[grammar] = matcher
            self._kept.move_to_end(grammar)
            while len(self._kept) > 1 and (len(self._kept) > KEPT or sum(map(len, self._kept)) > KEPT_CHARACTERS):
                self._kept.popitem(last=False)

    def _loaded(self) -> Any:
        """llguidance's tokenizer of the model; None, and why not, if there can't be one."""
        with self._loading:
            if self._tokenizer is None and not self._why:
                try:
                    self._tokenizer = tokenizer_of(self._load())
                except (VocabularyError, ImportError) as error:
                    self._why = str(error)
                except Exception as error:
                    log.exception("the vocabulary broke its reader")
                    self._why = f"{type(error).__name__}: {error}"
                if self._why:
                    log.warning("requests with grammars will be refused: %s", self._why)
            return self._tokenizer


def problem(matcher: Any) -> str:
    """Why a matcher is in its error state."""
    text: str = matcher.get_error()
    return text.removesuffix("<non-verbose/>").strip()


def tokenizer_of(vocabulary: Vocabulary) -> Any:
    """An `LLTokenizer` with one id more than the model: the end, which a mask allows where the grammar is complete.

    The model's own end ids are special to it like any other, so which of them end a text is the request's business.
    """
    from llguidance import LLTokenizer

    size, wrapped = len(vocabulary.tokens), _Wrapped(vocabulary)
    wrapped.tokenizer = LLTokenizer(wrapped, n_vocab=size + 1, eos_token=[size])  # type: ignore[arg-type]
    return wrapped.tokenizer


class _Wrapped:
    """What `LLTokenizer` reads a vocabulary from."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = len(vocabulary.tokens)
        named = {index: b"<|%d|>" % index for index in vocabulary.special}
        self.tokens = [named.get(index) or token for index, token in enumerate(vocabulary.tokens)] + [b"<|end|>"]
        self.special_token_ids = [*sorted(vocabulary.special), self.eos_token_id]
        self.tokenizer: Any = None

    def __call__(self, text: str) -> list[int]:
        """Text as tokens, the longest first: asked for only where a client's grammar wants forced tokens."""
        tokens: list[int] = self.tokenizer.greedy_tokenize(text)
        return tokens
