"""The sandbox of chat templates: what a template can't see, run or build, whoever wrote it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from services.text.chat_template import ChatTemplate, TemplateError

CHAT: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ raise_exception.__globals__['x'] }}",
        "{{ ''.format.__self__.x }}",
        "{{ messages.append('x') }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ namespace(__class__=1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ dict.__subclasses__() }}",
        "{{ messages|attr('__class__')|attr('x') }}",
        "{% include 'x' %}",
    ],
)
def test_a_template_cannot_reach_beyond_its_data(template: str) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(template).render(CHAT)


@pytest.mark.parametrize("template", ["{{ raise_exception.__globals__ }}", "{{ '{0.__class__}'.format(messages) }}"])
def test_what_a_template_may_not_see_is_empty_text(template: str) -> None:
    assert ChatTemplate(template).render(CHAT) == ""


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "loop turns"),
        ("{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}", "loop turns"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself without end"),
        ("{% for i in range(999999) %}{% endfor %}", "Range too big"),
        ("{{ 'a' * 1000000000 }}", "too many times"),
        ("{{ 1000000000 * [1] }}", "too many times"),
        ("{{ 9 ** 99999999 }}", "too large a power"),
        ("{% for i in range(70000) %}{{ 'a' * 1000 }}{% endfor %}", "characters"),
    ],
)
def test_a_template_cannot_run_or_grow_without_end(template: str, reason: str) -> None:
    with pytest.raises(TemplateError, match=reason):
        ChatTemplate(template).render(CHAT)


def test_the_budget_is_each_renderings_own() -> None:
    template = ChatTemplate("{% for i in range(90000) %}{% endfor %}ok")
    texts: list[str] = []
    threads = [threading.Thread(target=lambda: texts.append(template.render(CHAT))) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert texts == ["ok"] * 12
