r"""The reference answer of a row, the part of a completion that is its answer, and the graders that
compare text: ``exact_match``, ``regex`` and ``format``.

``references`` reads the reference for every grader that compares with one. It takes

    text       the answer itself; a solution that marks it (``#### 5`` at the end, ``\boxed{5}``,
               ``<answer>``); mathematics between ``$``, ``\(..\)`` or ``\[..\]``; for mathematics
               also a number with a unit, or a sentence with one formula or number
    numbers    22.0 of a table is 22
    lists      the answers that are accepted, also as JSON text; ``{"ground_truth": ..}``

``answer_of`` finds the answer: what stands after the thinking, and there the last ``\boxed{..}``,
else the last ``<answer>``, else, by ``answer``, an answer marked by words or the last number, else
the whole text.

These functions read the text once, in linear time. A regular expression of a recipe with nested
repetitions, as in ``(a+)+b``, can take time exponential in the length of the text, which only the
grading pool's deadline bounds.
"""

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from math import isnan
from typing import Any

from isobit.data.harmony import begins_in_harmony, final_answer
from isobit.records.text import (
    HARMONY,
    THINK_TAG,
    THOUGHT_TAG,
    Completion,
    Episode,
    Prompt,
    ends_in_thinking,
)
from isobit.rewards.counts import count
from isobit.rewards.grade import NO_REWARD
from isobit.util.errors import RewardError

OPENING, CLOSING = "<answer>", "</answer>"
BOX_OR_BRACE = re.compile(r"\\(?:boxed|fbox)\s{0,10}\{|\\.|[{}]", re.DOTALL)
"""A box, an escaped character, which is no brace of LaTeX's, or a brace."""
BETWEEN_BOXES = re.compile(
    r"(?:[\s$,;.&]|\\[,;:! \\()\[\]]|\\q?quad|and|or"
    r"|\\(?:text|textrm|mathrm)\s?\{\s*(?:and|or|,)\s*\})*"
)
JOINS = re.compile(r"[,;&]|and|or")
MOST_BETWEEN = 60
"""Characters between two boxes of one answer."""
FENCE = "```"
PYTHON = frozenset({"python", "python3", "py"})
RULES = ("boxed", "marked", "last_number")
"""Values of the option ``answer``."""


class UnusableReferenceError(Exception):
    """A row whose answers cannot be graded: nothing is paid, and the completions are left out."""

    kind = "unusable"


class MissingReferenceError(UnusableReferenceError):
    """The reference is null, NaN or empty."""

    kind = "missing"


class UnreadableReferenceError(UnusableReferenceError):
    """The reference holds no answer that could be compared."""

    kind = "unreadable"


def cell(prompt: Prompt, name: str, grader: str) -> Any:
    if name in prompt.row:
        return prompt.row[name]
    raise RewardError(
        f"the grader {grader} needs the column {name!r}, which prompt {prompt.id} does not have; "
        f"its columns are {', '.join(map(str, prompt.row)) or 'none'}"
    )


def references(
    prompt: Prompt, column: str, grader: str, mathematics: bool = False
) -> tuple[str, ...]:
    """The answers that ``column`` accepts, at least one.

    Raises ``RewardError`` for a missing column, ``MissingReferenceError`` and
    ``UnreadableReferenceError``.
    """
    value = cell(prompt, column, grader)
    texts = tuple(_texts(value))
    if not texts:
        raise MissingReferenceError(
            f"the reference of prompt {prompt.id}, column {column!r}, is missing ({value!r:.40})"
        )
    found = tuple(dict.fromkeys(one for text in texts for one in read_reference(text, mathematics)))
    if not found:
        raise UnreadableReferenceError(
            f"the reference of prompt {prompt.id}, column {column!r}, holds no answer that can be "
            f"told from its text ({texts[0]!r:.80}); mark it by '#### ' or \\boxed"
        )
    return found


def _texts(value: Any) -> Iterator[str]:
    """The texts of a cell that are not empty."""
    if hasattr(value, "tolist"):  # an array of numpy's, or one of its numbers
        value = value.tolist()
    match value:
        case None:
            return
        case str():
            yield from _texts_of_json(value.strip())
        case int():
            yield str(value)
        case float():
            if not isnan(value):
                yield _decimal(value)
        case {"ground_truth": inner}:  # as in verl's files
            yield from _texts(inner)
        case list() | tuple() | set() | frozenset():
            yield from (text for one in value for text in _texts(one))
        case _ if type(value).__name__ not in ("NAType", "NaTType") and value == value:
            yield from _texts(str(value))


def _texts_of_json(text: str) -> Iterator[str]:
    """``text``, or the items of a JSON list of texts, as in ``["34"]``."""
    if text.startswith('["') and text.endswith('"]'):
        try:
            items = json.loads(text)
        except ValueError:
            items = None
        if isinstance(items, list) and all(isinstance(item, str) for item in items):
            yield from (item.strip() for item in items if item.strip())
            return
    if text:
        yield text


def _decimal(number: float) -> str:
    """``number`` as people write it: 22 for 22.0, no exponent unless it is very small or large."""
    if number.is_integer() and abs(number) < 1e20:
        return str(int(number))
    mantissa, _, exponent = repr(number).partition("e")
    if not exponent:
        return mantissa
    if 0 > int(exponent) > -20:
        return f"{number:.{len(mantissa.partition('.')[2]) - int(exponent)}f}"
    return rf"{mantissa} \times 10^{{{int(exponent)}}}"


MARKED = re.compile(r"(?<!#)####(?!#)[ \t]{0,20}(\S[^\n]{0,500})")
WORDED = re.compile(
    r"\banswer\b(?:(?:\s(?:to|for|of|here|then|therefore)\b[\w \t]{0,40}?)?\sis\b\s?:?"
    r"|[*_ \t]{0,6}[:=]|\*\*(?=\s{0,3}\n))[*_\s]{0,6}(?=(\S[^\n]{0,500}))",
    re.IGNORECASE,
)
BOLD = re.compile(r"\*\*([^*\n]{1,200})\*\*")
LAST_NUMBER = re.compile(
    r"(?<![A-Za-z\d.])-?(?:[1-9]\d{0,2}(?:,\d{3}){1,10}(?!\d)|\d{1,60})(?:\.\d{1,60})?"
    r"(?:/\d{1,60})?(?!\d)"
)
SENTENCE_END = re.compile(r"\.(?:\s|\Z)")
SPAN = re.compile(
    r"(?<!\\)\$\$([^$]{1,500})\$\$|(?<!\\)\$([^$\n]{1,500})(?<!\\)\$"
    r"|\\\(((?:[^\\]|\\[^)]){1,500})\\\)|\\\[((?:[^\\]|\\[^\]]){1,500})\\\]"
)
GLUE = re.compile(r"(?<![\\A-Za-z{])\s(?:and|or|to|of|is|the|for|in|at|each)(?![A-Za-z}])")
WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,40}")
QUANTITY = re.compile(
    r"(?:[$€£¥]|\\\$)?\s?(-?\d[\d,]{0,60}(?:\.\d{1,60})?)(?:\s?[€£¥]|\s?\\?\$)?"
    r"(?:\s{0,3}-?\s?([A-Za-z][A-Za-z°/²³^*.\s-]{0,60}\d?))?"
)
COUNTED = re.compile(r"\d\s[a-z]{3}|[$€£]\s?\d")
NUMBER_IN_PROSE = re.compile(r"(?<![\w.,])-?\d[\d,]{0,60}(?:\.\d{1,60})?")
NO_UNIT = frozenset(
    word
    for line in (
        "am pm pi sqrt sin cos tan log ln exp mod and or not no to if when about at than less more",
        "least most between plus minus times over percent dozen hundred thousand million billion",
        "trillion half halves third thirds quarter quarters fourth fourths fifth fifths",
    )
    for word in line.split()
)
"""Words after a number that change it."""
NO_COUNT = NO_UNIT | {"except", "real", "number", "numbers", "integer", "integers", "odd", "even"}
NO_COUNT |= {"multiple", "multiples", "prime", "primes"}
"""Words of a sentence whose only number is not what it says."""
SHORT_UNITS = re.compile(r"[cmk]m|[km]g|ml|lb|oz|ft|in|yd|mi|hr|mph|kph|kmh")
LONGEST_PROSE = 10_000
MOST_WORDS = 12
"""Words of a reference for mathematics that is compared as text; a longer text is a solution."""


@lru_cache(maxsize=4096)
def read_reference(text: str, mathematics: bool) -> tuple[str, ...]:
    """The answers that a reference's text gives, each accepted; none where it cannot be told."""
    hashes = list(MARKED.finditer(text))
    if hashes and not text[hashes[-1].end() :].strip():
        return (hashes[-1][1].strip(),)
    if (marked := marked_answer(text)) is not None:
        return (marked.strip(),) if marked.strip() else ()
    inner = undelimited(text)
    if inner != text:
        return (inner, text)
    if not mathematics:
        return (text,)
    if (quantity := without_unit(text)) is not None:
        return (quantity, text)
    return _read_prose(text)


def _read_prose(text: str) -> tuple[str, ...]:
    """The answer in a text that is mathematics, or says it in words."""
    if len(text) > LONGEST_PROSE:
        return ()
    words = _prose_words(text)
    spans = [next(filter(None, span.groups())).strip() for span in SPAN.finditer(text)]
    if any(GLUE.search(span) for span in spans):  # two sums of money
        spans = []
    outside = SPAN.sub("\0", text)
    if spans and BETWEEN_BOXES.fullmatch(outside.replace("\0", "")):
        return (", ".join(spans),)
    if len(words) > 2 and (worded := worded_answer(text)) is not None:
        return read_reference(worded, True)
    if spans and len(_prose_words(outside)) > 2 and len(set(spans)) == 1:
        return (spans[0],)
    numbers = NUMBER_IN_PROSE.findall(text)
    is_more = NO_COUNT & set(text.lower().split()) or set(text) & set("\\=<>^/")
    if len(words) > 2 and len(numbers) == 1 and COUNTED.search(text) and not is_more:
        return (numbers[0].rstrip(","), text)
    return () if len(words) > MOST_WORDS or len(text) > 500 else (text,)


def _prose_words(text: str) -> list[str]:
    return WORD.findall(re.sub(r"\\text\w*\{[^{}]*\}|\\begin\{\w*\*?\}|\\end\{\w*\*?\}", " ", text))


def undelimited(text: str) -> str:
    r"""``text`` without ``$``, ``\(`` or ``\[`` around all of it."""
    span = SPAN.fullmatch(text.strip())
    return text if span is None else next(filter(None, span.groups())).strip()


def without_unit(text: str) -> str | None:
    """The number of ``20 apples``, ``$20`` or ``72 km/h``; None for anything else."""
    found = QUANTITY.fullmatch(text.strip().removesuffix("."))
    if found is None:
        return None
    number, unit = found.groups()
    if unit is None:
        return None if number == text else number.rstrip(",")
    words = re.findall(r"[a-z]+", unit.lower())
    attached = text.strip().find(unit) == text.strip().find(number) + len(number)
    if NO_UNIT & set(words) or not all(
        len(word) > 2 or SHORT_UNITS.fullmatch(word) for word in words[:1]
    ):
        return None
    return None if attached and not SHORT_UNITS.fullmatch(words[0]) else number.rstrip(",")


def answer_of(
    prompt: Prompt, completion: Completion, grader: str, answer: str, read_thinking: bool
) -> tuple[str, bool]:
    """The completion's answer, without white space around it, and whether it was marked: an
    unmarked answer is all of the text. Empty, and counted, where the thinking has not ended.

    Raises ``RewardError`` for an unknown ``answer``.
    """
    if answer not in RULES:
        raise RewardError(
            f"the grader {grader} got answer = {answer!r}; expected one of "
            f"{', '.join(map(repr, RULES))}"
        )
    text = visible(prompt, completion, grader, read_thinking)
    found = marked_answer(closed(text, completion))
    if found is None and answer != "boxed":
        found = worded_answer(text)
    if found is None and answer == "last_number":
        numbers = LAST_NUMBER.findall(text)
        found = numbers[-1] if numbers else None
    return (text, False) if found is None else (found, True)


def closed(text: str, completion: Completion) -> str:
    """What is seen of a completion with the stop string that ended it, for marks that it may
    close, as ``</answer>`` does.
    """
    return text and text + _stop_string(completion)


def _stop_string(completion: Completion) -> str:
    return getattr(completion, "stop_string", "")  # a stand-in has a text alone


def visible(prompt: Prompt, completion: Completion, grader: str, read_thinking: bool) -> str:
    """The text after the thinking; empty, and counted, where the thinking has not ended. With
    ``read_thinking`` all of it.
    """
    text = completion.text
    if read_thinking:
        return text
    is_thinking = ends_in_thinking(prompt.text)
    ends_in_harmony = prompt.text.rstrip().endswith(HARMONY[0])
    if ends_in_harmony or (not is_thinking and begins_in_harmony(text)):
        shown = final_answer(text, ends_in_harmony)
    else:
        shown = _after_tags(text, is_thinking)
    if shown is None:
        count(f"{grader}: unfinished thinking")
    return shown or ""


def _after_tags(text: str, is_thinking: bool) -> str | None:
    """What stands behind thinking between tags; None where the thinking has not ended."""
    ends = list(THOUGHT_TAG.finditer(text))
    begin = ends[-1].end() if ends else 0
    opened = THINK_TAG.search(text, begin)
    shown = text[begin : None if opened is None else opened.start()]
    begun = opened is not None or (not ends and is_thinking)
    return None if begun and (opened is None or not shown.strip()) else shown


def is_prose(text: str, accepted: tuple[str, ...]) -> bool:
    """Whether an unmarked ``text`` says more than an answer: several lines, marks of words, or more
    words than any accepted answer and than two.
    """
    text = text.strip()
    if len(text) > 500 or "\n" in text or "**" in text or "####" in text:
        return True
    most = max((len(WORD.findall(one)) for one in accepted), default=0)
    return len(WORD.findall(text)) > max(2, most)


def last_tagged(text: str) -> str | None:
    """The text of the last complete ``<answer>..</answer>``."""
    end = text.rfind(CLOSING)
    start = text.rfind(OPENING, 0, end) if end >= 0 else -1
    if start < 0:
        return None
    inside = text[start + len(OPENING) : end]
    return inside.partition(CLOSING)[0]


def last_boxed(text: str) -> str | None:
    r"""The text of the last complete ``\boxed{..}``, whose braces may nest; of several that are
    joined by commas or words such as "and", all of them.
    """
    boxes = _boxes(text)
    if not boxes:
        return None
    first = len(boxes) - 1
    while first and _are_joined(text[boxes[first - 1][2] : boxes[first][0]]):
        first -= 1
    return ", ".join(dict.fromkeys(text[start : end - 1] for _, start, end in boxes[first:]))


def _boxes(text: str) -> list[tuple[int, int, int]]:
    """The starts of each complete box and of its text, and its end; none is inside another.
    A box that never closes does not hide those behind it.
    """
    opened: list[tuple[int, int] | None] = []
    complete: list[tuple[int, int, int]] = []
    for token in BOX_OR_BRACE.finditer(text):
        if token[0] == "{":
            opened.append(None)
        elif token[0] == "}":
            if opened and (box := opened.pop()) is not None:
                while complete and complete[-1][0] > box[0]:
                    complete.pop()
                complete.append((*box, token.end()))
        elif token[0].endswith("{") and token[0][1] in "bf":
            opened.append((token.start(), token.end()))
    return complete


def _are_joined(between: str) -> bool:
    if len(between) > MOST_BETWEEN or JOINS.search(between) is None:
        return False
    return BETWEEN_BOXES.fullmatch(between) is not None


def marked_answer(text: str) -> str | None:
    r"""The last ``\boxed{..}``, else the last ``<answer>``."""
    boxed = last_boxed(text)
    return last_tagged(text) if boxed is None else boxed


def worded_answer(text: str) -> str | None:
    """The last answer that is marked by ``####``, by "answer is" or "Answer:", or in bold at the
    end.
    """
    found = [(one.start(), one[1]) for kind in (MARKED, WORDED) for one in kind.finditer(text)]
    bold = list(BOLD.finditer(text))
    if bold and not re.search(r"\w", text[bold[-1].end() :]):
        found.append((bold[-1].start(), bold[-1][1]))
    if not found:
        return None
    answer = SENTENCE_END.split(max(found)[1], maxsplit=1)[0].strip(" \t*_:")
    inner = next((one for span in SPAN.finditer(answer) for one in span.groups() if one), None)
    return answer if inner is None else inner.strip()


def last_code(text: str) -> str | None:
    """The last complete fenced block of Python, or else of no language."""
    marked = unmarked = None
    language: str | None = None
    lines: list[str] = []
    for line in text.splitlines():
        word = line.strip()
        if language is None:
            if word.startswith(FENCE):
                language, lines = word[len(FENCE) :].strip().lower(), []
        elif word == FENCE:
            code = "\n".join(lines) + "\n"
            if language in PYTHON:
                marked = code
            elif not language:
                unmarked = code
            language = None
        else:
            lines.append(line)
    return unmarked if marked is None else marked


def exact_match(
    prompt: Prompt,
    completion: Completion,
    column: str = "answer",
    ignore_case: bool = False,
    strip: bool = True,
    answer: str = "boxed",
    read_thinking: bool = False,
) -> float:
    """1.0 if the completion's answer (``answer_of``) is one of those that ``column`` accepts.

    ``strip`` ignores white space around both, ``ignore_case`` their case. Look-alikes of other
    alphabets are other characters. Raises as ``references`` and ``answer_of`` do.
    """
    expected = references(prompt, column, "exact_match")
    text, marked = answer_of(prompt, completion, "exact_match", answer, read_thinking)
    given = text.strip() if strip else text
    accepted = {one.casefold() for one in expected} if ignore_case else set(expected)
    if given and (given.casefold() if ignore_case else given) in accepted:
        return 1.0
    if not marked and is_prose(text, expected):
        count("exact_match: no marked answer")
    return 0.0


def regex_score(prompt: Prompt, completion: Completion, pattern: str, full: bool = False) -> float:
    """1.0 if ``pattern`` is found in the completion, with ``full`` if it matches all of it, with or
    without the stop string that ended it. Raises ``RewardError`` for an invalid regular expression.
    """
    del prompt  # every grader gets one
    expression = compiled(pattern)
    found = expression.fullmatch if full else expression.search
    return float(any(found(one) is not None for one in _with_and_without_stop(completion)))


def _with_and_without_stop(completion: Completion) -> tuple[str, ...]:
    stop = _stop_string(completion)
    return (completion.text + stop, completion.text) if stop else (completion.text,)


@lru_cache(maxsize=64)
def compiled(pattern: str) -> re.Pattern[str]:
    """``pattern``, in which a dot matches any character. Raises ``RewardError``."""
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise RewardError(f"{pattern!r} is no regular expression: {error}") from error


_LONGEST_TAG = 64
_OPENED = re.compile(r"<[A-Za-z][\w.-]*>\s*\Z")
"""An open tag at the end of a prompt."""
THINK_AND_ANSWER = (
    r"\s*<think>(?:(?!</?think>|</?answer>).)*</think>"
    r"\s*<answer>(?:(?!</?think>|</?answer>).)*</answer>\s*"
)
"""``<think>..</think><answer>..</answer>``, each once, with nothing around them."""


def format_score(prompt: Prompt, completion: Completion, pattern: str = THINK_AND_ANSWER) -> float:
    """1.0 if all of the completion matches ``pattern``, in which a dot matches any character. A tag
    that the prompt ends with, such as the ``<think>`` of a chat template's generation prompt, is
    its beginning, and the stop string that ended the completion is its end: the completion may
    match with them or by itself. Raises ``RewardError`` for an invalid regular expression.
    """
    expression, texts = compiled(pattern), _with_and_without_stop(completion)
    opened = _OPENED.search(prompt.text[-_LONGEST_TAG:])
    begun = () if opened is None else tuple(opened[0] + text for text in texts)
    return float(any(expression.fullmatch(one) is not None for one in (*begun, *texts)))


def environment_reward(prompt: Prompt, completion: Completion) -> float | None:
    """The value of the environment's ``get_reward`` for the episode; 0 where its class has only
    ``get_turn_reward``, and None where it gave None.
    """
    episode = completion.episode
    has_turn_rewards = completion.sequence.turn_rewards is not None
    if episode is not None and episode.reward is None and not episode.failure and has_turn_rewards:
        return 0.0
    if episode is not None and episode.failure == NO_REWARD:
        return None
    if episode is None or episode.reward is None:
        raise ValueError(f"the environment gave no reward: {_why_none(episode)}")
    return episode.reward


def _why_none(episode: Episode | None) -> str:
    if episode is None:
        return "there is no environment"
    kind, message = episode.failure, episode.failure_message
    if message.startswith(kind):  # an exception's name
        return message or "no get_reward"
    return f"{kind}: {message}" if message else kind


def no_reward(prompt: Prompt, completion: Completion) -> float:
    """0 for every completion: for runs that learn from a teacher alone."""
    return 0.0
