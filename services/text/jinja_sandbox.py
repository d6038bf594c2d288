"""Compiles and runs a chat template in Jinja's immutable sandbox, with the extras that transformers gives templates.

Templates come with model files and are not trusted: no attribute beyond plain data, a bound on loop turns and macro
calls, on the size of the text, and on what `*`, `**` and `range` may build.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_TURNS = 1_000_000  # loop turns of one rendering, about half a second of work
MACRO_COST = 25  # turns; the sandbox checks every call
MAX_CHARACTERS = 64_000_000  # of one rendering's result, and of what one operator may build
MAX_EXPONENT = 64


class TemplateError(ValueError):
    """The conversation can't be rendered; the message, often the template's own, is meant for the client."""


_UNSUITED = "the chat template can't render these messages"

_turns_left: ContextVar[int] = ContextVar("triptych_template_turns_left", default=MAX_TURNS)


_SPEND = "triptych_spend"


@jinja2.pass_context  # asking for the context keeps the compiler from folding the call into a constant
def _spend(_context: Any, turns: int) -> None:
    left = _turns_left.get() - turns
    _turns_left.set(left)
    if left < 0:
        raise jinja2.TemplateRuntimeError(f"the chat template takes more than {MAX_TURNS} loop turns")


def _bounded(template: nodes.Template) -> nodes.Template:
    """Lets every loop turn and macro call pay from a budget, so that no template runs for ever.

    The payment is a filter, because the sandbox checks calls, which costs 20 times as much.
    """
    for node in list(template.find_all((nodes.For, nodes.Macro, nodes.CallBlock))):
        cost = nodes.Const(1 if isinstance(node, nodes.For) else MACRO_COST)
        pay = nodes.ExprStmt(nodes.Filter(cost, _SPEND, [], [], None, None), lineno=node.lineno)
        node.body.insert(0, pay)  # type: ignore[attr-defined]
    return template


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text for training; serving just renders the inside."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares a plain set

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block, as transformers makes it: names set inside must stay inside.
        return nodes.CallBlock(self.call_method("inside"), [], [], body).set_lineno(line)

    def inside(self, caller: Callable[[], str]) -> str:
        return caller()


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            if not all(isinstance(side, (int, float)) and abs(side) <= MAX_EXPONENT for side in (left, right)):
                raise jinja2.TemplateRuntimeError("the chat template raises a number to too large a power")
        else:
            for sequence, times in ((left, right), (right, left)):
                repeats = isinstance(sequence, (str, list, tuple)) and isinstance(times, int)
                if repeats and len(sequence) * times > MAX_CHARACTERS:
                    raise jinja2.TemplateRuntimeError("the chat template repeats a text too many times")
        return super().call_binop(context, operator, left, right)


class _Dict:
    """`dict` for templates, without the class's other attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace` that can't hold names by which CPython's insides could be reached."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, attributes = args[0], dict(*args[1:], **kwargs)
        for name in attributes:
            _refuse_private(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        Namespace.__setitem__(self, name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a chat template can't store the underscore name {name!r}")


def _raise(message: Any) -> None:
    raise jinja2.TemplateError(str(message))


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which no model has seen in training.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class CompiledTemplate:
    """One template, compiled. Safe to use from several threads at once. `variables`: what it reads from outside."""

    def __init__(self, source: str, now: Callable[[], datetime]) -> None:
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters |= {"tojson": _tojson, _SPEND: _spend}
        environment.globals |= {
            "raise_exception": _raise,
            "strftime_now": lambda pattern: now().strftime(pattern),
            "dict": _Dict(),
            "namespace": _Namespace,
        }
        try:
            parsed = environment.parse(source)
            self.variables = frozenset(jinja2.meta.find_undeclared_variables(parsed))
            code = environment.compile(_bounded(parsed))
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"the chat template is not valid Jinja: {error.message} (line {error.lineno})"
            ) from error
        self._template = jinja2.Template.from_code(environment, code, environment.make_globals(None))

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text. Raises `TemplateError` for whatever goes wrong inside the template."""
        token = _turns_left.set(MAX_TURNS)
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(variables):
                size += len(part)
                if size > MAX_CHARACTERS:
                    raise TemplateError(f"the chat template writes more than {MAX_CHARACTERS} characters")
                parts.append(part)
        except TemplateError:
            raise
        except jinja2.UndefinedError as error:
            raise TemplateError(f"{_UNSUITED}: {error.message}") from error
        except jinja2.TemplateError as error:
            raise TemplateError(error.message or type(error).__name__) from error
        except RecursionError as error:
            raise TemplateError("the chat template calls itself without end") from error
        except Exception as error:
            # Python's own errors inside a template (list + str, a missing key): the conversation doesn't suit it.
            raise TemplateError(f"{_UNSUITED}: {error}") from error
        finally:
            _turns_left.reset(token)
        return "".join(parts)
