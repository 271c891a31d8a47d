"""What a chat template makes of a conversation is bounded, and what real templates do is not."""

from __future__ import annotations

import asyncio
import contextlib
import random
import resource
import runpy
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
from conftest import SMALL, Served

from swarm_engine.client import SwarmUnavailableError
from swarm_engine.errors import BadRequestError, SwarmEngineError, TemplateBoundError, TokenizerError
from swarm_engine.tracker import bounds
from swarm_engine.tracker.template import ChatTemplate
from swarm_engine.types import Mode
from swarm_engine.waiting import TakesLongError

FUZZ = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "fuzz_front.py"))
NOW = datetime(2026, 3, 4, tzinfo=UTC)
HI = [{"role": "user", "content": "hi"}]
NESTED = "{% set l = [0] %}" + "{% set l = [l, l] %}" * 60
"""A list of sixty-one lists, which as text has more characters than there are atoms in a gram."""

MAKES_MUCH = {
    "a product": "{{ 'x' * 10**10 }}",
    "a product of lists": "{{ ([0] * 10**9)|length }}",
    "a format with a width": "{{ '%1000000000d' % 1 }}",
    "a format with a width from outside": "{{ '%*d' % (10**9, 1) }}",
    "a format method": "{{ '{:>1000000000}'.format(1) }}",
    "a format method with a width from outside": "{{ '{:{w}}'.format(1, w=10**9) }}",
    "centred text": '{{ "".center(10**10) }}',
    "a filter that centres": '{{ ""|center(10**10) }}',
    "a filter that centres, in constants alone": '{{ "a"|center(10000000000) }}',
    "an indent": "{{ 'a\nb'|indent(10**9) }}",
    "an indent of JSON": "{{ messages|tojson(indent=10**9) }}",
    "a block through a filter": "{% filter indent(10**9) %}a\nb{% endfilter %}",
    "a text joined with itself": "{% set s = 'xx' %}" + "{% set s = s ~ s %}" * 60,
    "a text added to itself": "{% set s = 'xx' %}" + "{% set s = s + s %}" * 60,
    "a text set to itself twice": "{% set s %}xx{% endset %}" + "{% set s %}{{ s }}{{ s }}{% endset %}" * 60,
    "a replacement": "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "a replacing filter": "{{ ('a' * 100000)|replace('a', 'b' * 100000) }}",
    "a joined list": "{{ (['x' * 100000] * 100000)|join }}",
    "a joined generator": "{{ range(100000)|map(attribute='a', default='x' * 100000)|join }}",
    "loops in loops": "{% for a in range(10000) %}{% for b in range(10000) %}{% for c in range(10000) %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "loops over constants": "{% for a in [1,2,3,4,5,6,7,8,9] %}" * 12 + "{% endfor %}" * 12,
    "a loop that chooses nothing": "{% for a in range(100000) %}{% for b in range(100000) if b < 0 %}{% endfor %}"
    "{% endfor %}",
    "a loop that writes much": "{% for a in range(100000) %}" + "x" * 10_000 + "{% endfor %}",
    "a macro that calls itself twice": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
    "a loop that calls itself twice": "{% for a in [60] recursive %}{% if a %}{{ loop([a - 1, a - 1]) }}{% endif %}"
    "{% endfor %}",
    "a power": "{{ 10 ** (10 ** 8) }}",
    "a power in steps": "{% set a = 7 %}" + "{% set a = a * a %}" * 60,
    "a long division": "{{ ('f' * 1000000)|int(base=16) // ('e' * 500000)|int(base=16) }}",
    "a list in itself, shown": NESTED + "{{ l }}",
    "a list in itself, as JSON": NESTED + "{{ l|tojson }}",
    "a list in itself, formatted": NESTED + "{{ '%s' % l }}",
    "a list in itself, as a format": NESTED + "{{ l|format(1) }}",
    "a list in itself, compared": NESTED + "{% set m = [l, 0] %}{{ m == [l, 1] }}",
    "a list in itself, searched": NESTED + "{{ [0, l] in [[1, l]] + messages }}",
    "a list in itself, in a test": NESTED + "{{ l is eq l }}",
    "a list in itself, as an error": NESTED + "{{ raise_exception(l) }}",
    "a namespace in itself": "{% set n = namespace() %}{% set n.n = n %}{{ n }}",
    "batches": "{{ [1]|batch(10**10, 'x')|list }}",
    "slices": "{{ [1]|slice(10**9)|list }}",
    "bytes of an integer": "{{ (5).to_bytes(10**10, 'big') }}",
    "a dictionary of equal values": "{{ {}.fromkeys(range(100000), 'x' * 10000) }}",
    "a search from the right": "{{ ('a' * 1000000).rfind('b' ~ 'a' * 500000) }}",
    "a codec of the square of the length": "{{ ('é' * 300000).encode('punycode') }}",
    "a sum of lists": "{{ ([[1]] * 100000)|sum(start=[]) }}",
}


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {}, NOW)


@pytest.mark.parametrize("source", MAKES_MUCH.values(), ids=MAKES_MUCH)
def test_a_template_that_makes_too_much_is_stopped_before_it_has(source: str) -> None:
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TemplateBoundError, match="makes too much of these messages") as caught:
        template(source).render(HI, add_generation_prompt=True)
    assert caught.value.status == 400
    assert caught.value.param == "messages"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 300_000


@pytest.mark.parametrize(
    "source",
    ["{{ 1 / 0 }}", "{{ [][0].a.b }}", "{{ 'x' * 10**30 }}", "{{ {[1]: 2} }}", "{{ 2.0 ** 5000 }}", "{{ '%d' % 'a' }}"],
)
def test_whatever_a_template_raises_is_a_refusal_of_the_messages(source: str) -> None:
    with pytest.raises(SwarmEngineError) as caught:
        template(source).render(HI, add_generation_prompt=True)
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "template_refused", "messages")


def test_the_words_of_a_template_that_refuses_are_kept_short() -> None:
    with pytest.raises(BadRequestError) as caught:
        template("{{ raise_exception('no' * 100000) }}").render(HI, add_generation_prompt=True)
    assert len(str(caught.value)) < 1000


NO_JINJA = ("{% for %}", "{{ " + "(" * 5000, "{% if a %}" * 200 + "{% endif %}" * 200, "9" * (1 << 21))


@pytest.mark.parametrize("source", NO_JINJA, ids=range(4))
def test_a_template_that_can_not_be_compiled_is_no_template(source: str) -> None:
    with pytest.raises(TokenizerError):
        template(source)


ORDINARY = {
    "{{ 'ab' * 3 }}{{ 2 ** 10 }}{{ 7 % 4 }}{{ 7 // 2 }}{{ 1 - 3 }}": "ababab1024332-2".replace("332", "33"),
    "{{ '%s:%5d|%-4s|' % ('a', 42, 'b') }}": "a:   42|b   |",
    "{{ '{:>4}{x}'.format(7, x='é') }}": "   7é",
    "{{ 'a-b-c'.split('-')|join('+') }}{{ 'abc'|replace('b', 'xx') }}{{ 'abc'.replace('c', '') }}": "a+b+caxxcab",
    "{{ 'a\nb'|indent(2) }}{{ 'a'|center(5) }}|": "a\n  b  a  |",
    "{% for a in [1, 2, 3] %}{{ loop.index }}/{{ loop.length }}{% if loop.last %}.{% endif %}{% endfor %}": (
        "1/32/33/3."
    ),
    "{% for a in [1, 2, 3, 4]|select('even') %}{{ a }}{% endfor %}": "24",
    "{% for a in [[1, [2]]] recursive %}{{ a[0] }}{% for b in a[1] %}{{ b }}{% endfor %}{% endfor %}": "12",
    "{% for a in {'x': 1}.items() %}{{ a[0] }}={{ a[1] }}{% endfor %}": "x=1",
    "{{ [3, 1, 2]|sort|first }}{{ [1, 1]|unique|list|length }}{{ [1, 2]|sum }}{{ 'b a'|title }}": "113B A",
    "{% set n = namespace(a=1) %}{% set n.a = n.a + 1 %}{% macro m(n) %}{{ n.a }}{% endmacro %}{{ m(n) }}": "2",
    "{{ messages[0]['content'][0:1] }}{{ messages[::-1]|length }}{{ 'role' in messages[0] }}": "h1True",
    "{{ 'a' in ['a', 'b'] }}{{ 1 < 2 <= 2 }}{{ messages[0].role == 'user' }}{{ messages == messages }}": (
        "TrueTrueTrueTrue"
    ),
    "{{ {'b': 1, 'a': [2]}|tojson }}{{ {'a': 1}|tojson(indent=2) }}": '{"b": 1, "a": [2]}{\n  "a": 1\n}',
    "{% set s %}x{% endset %}{{ s ~ 1 ~ none }}{% filter upper %}y{% endfilter %}": "x1NoneY",
    "{{ strftime_now('%Y') }}{{ missing }}{{ missing|default('d') }}{{ 'a' is string }}": "2026dTrue",
}


@pytest.mark.parametrize(("source", "text"), ORDINARY.items())
def test_what_templates_do_is_done_as_jinja_does_it(source: str, text: str) -> None:
    assert template(source).render(HI, add_generation_prompt=True) == text


def test_a_conversation_of_five_million_characters_is_rendered() -> None:
    source = (
        "{% for m in messages %}{% set c = m.content|trim %}<{{ m.role }}>{{ c + '\\n' }}"
        "{% if loop.last or '</think>' in c %}.{% endif %}{% endfor %}"
    )
    messages = [{"role": "user", "content": "y" * 1000} for _ in range(5_000)]
    assert len(template(source).render(messages, add_generation_prompt=True)) == 5_000 * 1007 + 1


def test_a_rendering_that_takes_long_is_left_to_a_thread_where_others_would_wait_for_it() -> None:
    long = template("{% for a in range(99999) %}{{ a }}{% endfor %}")

    async def at_once() -> None:
        assert template("{{ messages|length }}").render(HI, add_generation_prompt=True) == "1"
        with pytest.raises(TakesLongError):
            long.render(HI, add_generation_prompt=True)
        assert len(await asyncio.to_thread(long.render, HI, add_generation_prompt=True)) == 488_885

    asyncio.run(at_once())


def test_generated_templates_end_soon_and_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seeded part of `scripts/fuzz_front.py`, with a quarter of what a template may spend."""
    monkeypatch.setattr(bounds, "MAX_UNITS", 1 << 24)
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for piece in FUZZ["valid_templates"](random.Random(4), 200):
        begun = time.thread_time()
        with contextlib.suppress(BadRequestError, TemplateBoundError):
            template(FUZZ["PRELUDE"] + piece).render(HI, add_generation_prompt=True)
        assert time.thread_time() - begun < 3, piece
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 200_000


# Through a server

OWN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
"""As little as a template can be."""


def test_a_template_that_makes_too_much_of_everything_fails_the_start_by_name(serving: Callable[..., Served]) -> None:
    served = serving(template="{{ 'x' * 10**10 }}" + OWN)
    with served.client() as client, pytest.raises(SwarmUnavailableError, match="chat template makes too much"):
        client.start(SMALL, wait=True)


def test_a_template_that_makes_too_much_of_one_conversation_costs_that_request(serving: Callable[..., Served]) -> None:
    served = serving(template="{% if messages[-1].content == 'grow' %}{{ 'x' * 10**10 }}{% endif %}" + OWN)
    with served.client() as client:
        client.start(SMALL, wait=True)
        with client.episode("t", mode=Mode.DEBUG) as episode:
            url, headers = f"{episode.base_url}/chat/completions", {"authorization": f"Bearer {episode.api_key}"}

            def ask(content: str) -> httpx.Response:
                body = {"model": "policy", "messages": [{"role": "user", "content": content}]}
                return httpx.post(url, json=body, headers=headers, timeout=60)

            refused = ask("grow")
            assert refused.status_code == 400
            assert refused.json()["error"]["code"] == "template_refused"
            assert "makes too much" in refused.json()["error"]["message"]
            assert ask("stay").status_code == 200
            episode.end(reward=None)
