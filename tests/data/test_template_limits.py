"""What a chat template computes is bounded, operation by operation, and its output is the same."""

import time
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers.utils import chat_template_utils

from isobit.data import template_limits
from isobit.data.chat_template import CLOCK, rendered
from isobit.data.template_limits import Allowance, compiled, limited
from isobit.data.tokenizer import load_tokenizer
from isobit.starter import starter_folder
from tests.data.test_chat_templates import DATE, FAMILIES, TOOLS, tokenizer_of

LARGE = "it makes a value of"
HUGE = {
    "{{ ('a' * 99999999999)|length }}": LARGE,
    "{{ (99999999999 * ['a'])|length }}": LARGE,
    "{{ ('%1500000000d' % 1)|length }}": "has more than 100,000 columns",
    "{{ ('%(a)1500000000d' % {'a': 1})|length }}": "has more than 100,000 columns",
    "{{ ('%.*f' % (1500000000, 1))|length }}": "has more than 100,000 columns",
    "{{ '%1500000000d'|format(1) }}": "has more than 100,000 columns",
    "{{ '{:1500000000d}'.format(1) }}": "has more than 100,000 columns",
    "{{ '{:{}}'.format(1, 1500000000) }}": "has more than 100,000 columns",
    "{{ '{a:>1500000000}'.format_map({'a': 1}) }}": "has more than 100,000 columns",
    "{% set a = 'x' * 8000000 %}{{ ('{0}' * 1000).format(a) }}": LARGE,
    "{% set a = 'x' * 8000000 %}{{ ('%(a)s' * 1000) % {'a': a} }}": LARGE,
    "{{ range(99999)|join('x' * 1000000) }}": LARGE,
    "{{ ('x' * 1000000).join(range(999)|map('string')) }}": LARGE,
    "{{ ('\n' * 99999)|indent(1000000, first=true, blank=true) }}": LARGE,
    "{{ 'x'|center(2000000000) }}": LARGE,
    "{{ 'x'.zfill(2000000000) }}": LARGE,
    "{{ 'x'['ljust'](2000000000) }}": LARGE,
    "{{ ('x'|attr('center'))(2000000000) }}": LARGE,
    "{{ '\t'.expandtabs(2000000000) }}": LARGE,
    "{{ ('a' * 99999).replace('', 'b' * 99999) }}": LARGE,
    "{{ ('a' * 99999)|replace('a', 'b' * 99999) }}": LARGE,
    "{{ ('a' * 99999).translate({97: 'b' * 99999}) }}": "may call str.translate",
    "{{ (5).to_bytes(2000000000, 'big') }}": "may call int.to_bytes",
    "{{ 'x'.encode() }}": "may call str.encode",
    "{{ lipsum(n=100000) }}": "lipsum",
    "{{ 'x'|wordwrap(1) }}": "is not there for chat templates",
    "{{ [1]|batch(2000000000, 'x')|list }}": "is asked for 2,000,000,000",
    "{{ [1]|slice(2000000000)|list }}": "is asked for 2,000,000,000",
    "{{ 5|round(-1000000000) }}": "is asked for -1,000,000,000",
    "{{ [[1]]|tojson(indent=2000000000) }}": "more than 64 columns",
    "{{ [[1], [2]]|sum(start=[]) }}": "adds numbers",
    "{{ ('x' * 8000000)|list|length }}": LARGE,
    "{{ ('x ' * 4000000).split(' ')|length }}": LARGE,
    "{{ {}.fromkeys(range(99999), 'x' * 8000000) }}": LARGE,
    "{{ range(99999)|map('center', 8000000)|list|length }}": LARGE,
    "{{ strftime_now('%c' * 9999) }}": "the layout of the date",
    "{% set a = 'x' * 8000000 %}{% for i in range(99) %}{{ a }}{% endfor %}": LARGE,
}
DOUBLED = "{% set ns = namespace(x=START) %}{% for i in range(60) %}STEP{% endfor %}{{ ns.x == 1 }}"
STEPS = {
    "{% set ns.x = [ns.x, ns.x] %}": "[1]",
    "{% set ns.x = {'a': ns.x, 'b': ns.x} %}": "1",
    "{% set ns.x = (ns.x, ns.x) %}": "1",
    "{% set ns.x = ns.x + ns.x %}": "'x'",
    "{% set ns.x = ns.x ~ ns.x %}": "'x'",
    "{% set ns.x = ns.x * ns.x %}": "3",
    "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}": "'x'",
    "{% set ns.x = dict(a=ns.x, b=ns.x) %}": "1",
    "{% set ns.x = [ns.x] * 2 %}": "1",
}
DEEP = "{% set ns = namespace(x=1) %}{% for i in range(9999) %}{% set ns.x = [ns.x] %}{% endfor %}"
MANY = "{% set a = 'x' * 8000000 %}{% for i in range(99) %}{% set b = a[1:] %}{% endfor %}"


def render(template: str) -> str:
    tokenizer = load_tokenizer(starter_folder())
    tokenizer.chat_template = template
    return rendered([{"role": "user", "content": "1+1="}], tokenizer, True)


@pytest.mark.parametrize(("template", "reason"), HUGE.items())
def test_no_operation_makes_more_than_a_conversation_needs(template: str, reason: str) -> None:
    with pytest.raises(TemplateError, match=reason):
        render(template)


@pytest.mark.parametrize(("step", "start"), STEPS.items())
def test_what_doubles_is_refused_before_it_is_large(step: str, start: str) -> None:
    with pytest.raises(TemplateError, match=LARGE):
        render(DOUBLED.replace("START", start).replace("STEP", step))


def test_depth_and_all_values_together_are_bounded() -> None:
    with pytest.raises(TemplateError, match="more than 500 lists within lists"):
        render(DEEP)
    with pytest.raises(TemplateError, match="all that it makes is too much"):
        render(MANY)
    for nested in ("{% set ns.x = namespace(a=ns) %}", "{% set ns.x = ns %}{{ ns }}"):
        with pytest.raises(TemplateError, match="puts a namespace into another value"):
            render("{% set ns = namespace(x=1) %}" + nested)


def test_time_is_bounded_between_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(10**6))
    monkeypatch.setattr(time, "thread_time", lambda: float(next(now)))
    with pytest.raises(TemplateError, match="has not ended after 10 s of computing"):
        render("{% for i in range(99) %}{{ i + 1 }}{% endfor %}")
    with pytest.raises(TemplateError, match="has not ended after 10 s of computing"):
        render("{% for i in range(99999) %}{% if i == 1 %}{% endif %}{% endfor %}")


def test_nothing_is_computed_while_a_template_is_compiled() -> None:
    """jinja folds constants: an operation of constants would be done before any rendering."""
    for template in ("{{ 'abc' * 2000000000 }}", "{{ 'x'|center(2000000000) }}"):
        assert compiled(template).environment.filters


def test_the_limits_grow_with_the_conversation() -> None:
    with limited(["x" * 10**7]) as allowance:
        allowance.expect(5 * 10**7)
    with pytest.raises(TemplateError, match=LARGE):
        Allowance("x").expect(5 * 10**7)


@pytest.mark.few(10)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("turns", "size"), [(200, 2_500), (1, 500_000)])
def test_conversations_of_a_megabyte_are_rendered_as_ever(
    family: str, turns: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, messages = tokenizer_of(family), list[Any]()
    for _ in range(turns):
        messages.append({"role": "user", "content": "q" * size})
        messages.append({"role": "assistant", "content": "a\n" * (size // 2)})
    messages.append({"role": "user", "content": "And?"})
    monkeypatch.setattr(template_limits, "SECONDS", 60.0)
    found = rendered(messages, tokenizer, True, tools=TOOLS, date=DATE)
    assert len(found) > 10**6
    template = tokenizer.get_chat_template(None, list(TOOLS))
    chat_template_utils._compile_jinja_template(template).globals[CLOCK] = DATE.strftime
    theirs = tokenizer.apply_chat_template(
        messages, tools=list(TOOLS), tokenize=False, add_generation_prompt=True
    )
    assert found == theirs


def test_what_templates_compute_is_as_in_transformers() -> None:
    """Operations of which no family's template has an example here."""
    tokenizer = load_tokenizer(starter_folder())
    tokenizer.chat_template = (
        "{{ '=' * 20 }}{{ 'a,b'.split(',')|join(' ') }}{{ '%-6s|%03d' % ('x', 7) }}"
        "{{ '{:>6}{}'.format('y', [1, 'z']) }}{{ {'a': [1, (2,)]} }}{{ [1, 2, 3][::-1] }}"
        "{{ ('<b>'|e).format('<i>') }}{{ ('%s'|safe) % '<i>' }}{{ [3, 1]|sort|tojson(indent=2) }}"
        "{{ 'a\nb'|indent(2) }}{{ range(7)|batch(3)|list }}{{ 7.5|round(0) }}{{ 2 ~ 'x' ~ none }}"
        "{% set ns = namespace(a=1) %}{% set ns.a = ns.a + 1 %}{{ ns.a }}{{ messages[0]['role'] }}"
        "{% macro m(x) %}<{{ x }}>{{ caller() }}{% endmacro %}{% call m('y') %}z{% endcall %}"
        "{{ messages|selectattr('role', 'equalto', 'user')|list|length }}{{ missing is defined }}"
        "{{ '\t'.expandtabs(4)|length }}{{ 'abc'|center(9) }}{{ 'aXa'.replace('X', '--', 1) }}"
        "{{ '%(a)s%%' % {'a': 5} }}{{ 7 // 2 }}{{ -7 % 3 }}{{ 1.5 * 2 }}{{ 'ab' 'cd' }}"
    )
    messages = [{"role": "user", "content": "1+1="}]
    theirs = tokenizer.apply_chat_template(messages, tokenize=False)
    assert rendered(messages, tokenizer, False) == theirs
