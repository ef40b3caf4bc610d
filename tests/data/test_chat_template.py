"""Templates of strangers: they read nothing, and they end."""

from typing import Any

import pytest
from jinja2 import TemplateError

from isobit.data.chat_template import rendered
from isobit.data.prompts import prompts_of_rows
from isobit.data.sources import Row
from isobit.errors import DataError
from tools.starter.tokenizer import build_tokenizer

LOOP = "{% for i in range(99999) %}"
HOSTILE = {
    "nested loops": LOOP * 3 + "{% endfor %}" * 3,
    "a power of a power": "{{ 10 ** 10 ** 10 }}",
    "too large": "x" * (1 << 20) + "y",
    "its own words": "{{ raise_exception('no') }}",
    "another role": "{% if messages[0].role != 'bot' %}{{ raise_exception('no') }}{% endif %}",
    "a file": "{% include '/etc/passwd' %}",
    "an import": "{% import 'os' as os %}{{ os.system('true') }}",
    "Python's insides": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "a method that writes": "{{ messages.append(1) }}",
    "no template": "{% for",
    "no text": "{{ 1 / 0 }}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
}


def tokenizer(template: Any) -> Any:
    made = build_tokenizer(context_tokens=64)
    made.chat_template = template
    return made


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_refused_by_row(name: str) -> None:
    rows = [Row("1+1=", {}, "file.jsonl, line 7")]
    with pytest.raises(DataError, match=r"^file.jsonl, line 7: the chat template refuses"):
        prompts_of_rows("p", rows, tokenizer(HOSTILE[name]), chat=True)


def test_an_honest_template_is_what_transformers_renders() -> None:
    template = (
        "{% macro f(x) %}[{{ x }}]{% endmacro %}{%- for m in messages %}{{ f(m.content) }}"
        "{% endfor %}{{ dict(**{'a': 1}).a }}"
    )
    made = tokenizer(template)
    messages = [{"role": "user", "content": str(n)} for n in range(500)]
    assert rendered(messages, made, add_generation_prompt=True) == made.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )


def test_a_choice_of_templates_is_checked_whole() -> None:
    made = tokenizer({"default": "x", "other": HOSTILE["a power of a power"]})
    with pytest.raises(TemplateError, match="computes a power"):
        rendered([{"role": "user", "content": "x"}], made, add_generation_prompt=False)
