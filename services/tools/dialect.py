"""How the served model writes calls and thoughts: found in its chat template, or configured. Makes the readers."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from services.errors import ApiError
from services.text.chat_template import ChatTemplate
from services.text.tokenizer import Tokenizer
from services.tools import hermes, llama, mistral, qwen_coder, reasoning
from services.tools.calls import Sink
from services.tools.grammar import keeps_patterns
from services.tools.hermes import Hermes
from services.tools.llama import LlamaJson
from services.tools.mistral import Mistral
from services.tools.parser import Parser
from services.tools.pythonic import Pythonic
from services.tools.qwen_coder import QwenCoder
from services.tools.reader import MessageReader
from services.tools.reasoning import Reasoning
from services.tools.request import ToolUse

log = logging.getLogger("triptych.api")

PARSERS: dict[str, type[Parser]] = {
    "hermes": Hermes,
    "llama3_json": LlamaJson,
    "pythonic": Pythonic,
    "mistral": Mistral,
    "qwen3_coder": QwenCoder,
}
REASONING = ("qwen3", "deepseek_r1")
_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_ID_LENGTH = 9
"""Mistral's templates take no other."""
_ONE_CALL = "only supports single tool-calls"
_TAIL = 8
"""Tokens at a prompt's end in which an opened thought is looked for."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """`parser` and `reasoning` are names of formats, "" for none.

    `markers` maps the special tokens that mark calls and thoughts to their texts: readers have to see them. `listed`:
    a Mistral model's calls are a list of objects. `parallel`: the template takes several calls in one message, as Llama
    3's doesn't.
    """

    tokenizer: Tokenizer
    parser: str = ""
    reasoning: str = ""
    markers: dict[int, str] = field(default_factory=dict)
    listed: bool = True
    parallel: bool = True

    @classmethod
    def of(cls, tokenizer: Tokenizer, template: ChatTemplate | None, parser: str, thoughts: str) -> Dialect:
        """The dialect of a model; `auto` for what its template shows."""
        source = template.source if template is not None else ""
        if parser == "auto":
            parser = _parser_of(source, template is not None and template.takes_tools)
        if thoughts == "auto":
            thoughts = "qwen3" if all(marker in source for marker in reasoning.MARKERS) else "none"
        parser, thoughts = ("" if name == "none" else name for name in (parser, thoughts))
        texts = (PARSERS[parser].markers if parser else ()) + (reasoning.MARKERS if thoughts else ())
        ids = {text: tokenizer.token_to_id(text) for text in texts}
        markers = {token: text for text, token in ids.items() if token is not None and token in tokenizer.special_ids}
        log.info("tool calls: %s, reasoning: %s", parser or "no format", thoughts or "no format")
        several = _ONE_CALL not in source
        return cls(tokenizer, parser, thoughts, markers, mistral.ARGS not in source, several)

    def as_text(self, marker: str) -> str:
        """A marker in a grammar, as a text."""
        return json.dumps(marker)

    def as_token(self, marker: str) -> str:
        """A marker in a grammar, as the special token that it is, if it is one."""
        token = next((token for token, text in self.markers.items() if text == marker), None)
        return self.as_text(marker) if token is None else f"<[{token}]>"

    def fit(self, use: ToolUse | None) -> ToolUse | None:
        """What a request wants of tools, as far as the model can. ApiError 400 if its calls can't be told from text."""
        if use is None:
            return None
        if not self.parser:
            message = "tools: the format in which this model calls them is not known; --tool-call-parser names it"
            raise ApiError(400, message, code="unsupported", param="tools")
        if use.custom & use.strict and not keeps_patterns(self.parser, use):
            message = "tools: a custom tool's format can't be kept in this model's calls; leave it out or force a call"
            raise ApiError(400, message, code="unsupported", param="tools")
        return replace(use, parallel=use.parallel and self.parallel)

    def shown(self, use: ToolUse | None) -> frozenset[int]:
        """Special tokens whose text a reader has to see."""
        texts = (PARSERS[self.parser].markers if use is not None else ()) + (
            reasoning.MARKERS if self.reasoning else ()
        )
        return frozenset(token for token, text in self.markers.items() if text in texts)

    def reader(
        self,
        use: ToolUse | None,
        prompt_ids: Sequence[int],
        random: Callable[[], int],
        *,
        show_reasoning: bool = True,
        hide_special: bool = True,
    ) -> Callable[[], MessageReader] | None:
        """Makes a reader for each choice of a request; None if all its text is content. `random` makes calls' ids."""
        if use is None and not self.reasoning:
            return None
        inside = bool(self.reasoning) and self.opened(prompt_ids)
        hidden = self.markers.values() if hide_special else ()

        def make() -> MessageReader:
            thoughts = Reasoning(inside=inside) if self.reasoning else None
            parser = None
            if use is not None:
                kind = PARSERS[self.parser]
                shown = [text for text in hidden if text in kind.markers]
                parser = kind(Sink(lambda: call_id(random()), single=not use.parallel), use.schemas, shown)
            custom = use.custom if use is not None else ()
            return MessageReader(thoughts, parser, show_reasoning=show_reasoning, custom=custom)

        return make

    def opened(self, prompt_ids: Sequence[int]) -> bool:
        """Whether the answer to this prompt begins with a thought."""
        end = self.tokenizer.decode(prompt_ids[-_TAIL:], skip_special_tokens=False).rstrip()
        if self.reasoning == "deepseek_r1":
            return not end.endswith(reasoning.CLOSE)
        return end.endswith(reasoning.OPEN)


def _parser_of(source: str, takes_tools: bool) -> str:
    """The format that a template shows. One without tools gets Hermes' format, in which they are then described."""
    if mistral.CALLS in source:
        return "mistral"
    if qwen_coder.FUNCTION in source and qwen_coder.PARAMETER in source:
        return "qwen3_coder"
    if hermes.OPEN in source:
        return "hermes"
    if "func_name1(" in source:
        return "pythonic"
    if llama.TAG in source or '"parameters": dictionary' in source:
        return "llama3_json"
    return "none" if takes_tools else "hermes"


def call_id(number: int) -> str:
    """An id for a call: letters and digits."""
    letters = []
    for _ in range(_ID_LENGTH):
        number, letter = divmod(number, len(_ALPHABET))
        letters.append(_ALPHABET[letter])
    return "".join(letters)
