"""The viewer's answers on completions: a page of them, one with its neighbours, the rewards of a
step, and two runs prompt by prompt.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, cast, get_args

import numpy as np

from isobit.observe.completion_files import PAGE, Completions, Order, Query
from isobit.observe.report.histogram import draw_histogram
from isobit.observe.report.numbers import in_a_line
from isobit.observe.report.templates import fill
from isobit.observe.run_record import WatchedRun
from isobit.records.rounding import are_level
from isobit.util.errors import IsobitError

Values = Mapping[str, str]
"""The values of a request by name."""

SHORT = 240
"""Characters of a text in a table of completions."""
MOST_TOKENS = 20_000
"""Tokens of a completion that are sent."""
MOST_LOOKS = 20
"""Looks at a file for a completion that was asked for."""
MOST_OF_GROUP = 512
MOST_PAIRS = 200
"""Prompts of a paired comparison that are listed."""
NEIGHBOUR_S = 0.25
"""Seconds to search for the next match, or the one before."""


class NotThereError(Exception):
    """Raised for a completion or a run that is not, or no longer, there."""


def number(values: Values, name: str, kind: type[int] | type[float]) -> Any:
    """A number of the request; None where it has none.  Raises ValueError for other text."""
    text = values.get(name, "").strip()
    if not text:
        return None
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{name} is {text[:80]!r}, which is no number") from None


def step_range(values: Values) -> tuple[float, float]:
    """The first and the last step that are asked for."""
    first, last = (number(values, name, int) for name in ("from", "to"))
    return -math.inf if first is None else first, math.inf if last is None else last


def query_of(values: Values) -> Query:
    """The filters and the order of a request.  Raises ValueError."""
    first, last = step_range(values)
    order = values.get("order") or "newest"
    if order not in get_args(Order):
        raise ValueError(f"order is {order[:80]!r}; it is one of {', '.join(get_args(Order))}")
    return Query(
        source=values.get("source", ""),
        prompt_id=values.get("prompt", ""),
        text=values.get("text", ""),
        first_step=first,
        last_step=last,
        lowest=number(values, "lowest", float),
        highest=number(values, "highest", float),
        order=cast("Order", order),
    )


def completions_of(runs: Sequence[WatchedRun], choice: str) -> list[Completions]:
    """The completions of each run that were kept (``1``) or the samples (``0``); without a choice
    those that were kept, if all of the runs keep all.
    """
    of_kept = choice == "1" or (not choice and all(map(_keeps_all, runs)))
    chosen: list[Completions] = [run.kept if of_kept else run.samples for run in runs]
    for completions in chosen:
        completions.look()
    return chosen


def _keeps_all(run: WatchedRun) -> bool:
    """Whether the run's recipe keeps all completions, and there are some."""
    run.kept.look()
    return (
        run.record().setting("config", "tracking", "completions") == "all"
        and len(run.kept.index) > 0
    )


def page_of_completions(run: WatchedRun, values: Values) -> dict[str, Any]:
    """A page of the completions that fit the filters, behind the place ``after``."""
    (completions,) = completions_of([run], values.get("kept", ""))
    if completions is not run.kept:
        run.kept.look()
    rows, further = [], None
    if (most := min(PAGE, number(values, "most", int) or 0)) or "most" not in values:
        rows, further = completions.find(
            query_of(values), number(values, "after", int), most=most or PAGE
        )
    return {
        "rows": [_row(place, content) for place, content in rows],
        "next": further,
        "total": len(completions.index),
        "of_kept": completions is run.kept,
        "kept": len(run.kept.index) if run.kept.progress == 1 else None,
        "progress": completions.progress,
        "sources": completions.index.sources,
        "running": run.record().is_running,
    }


def one_completion(run: WatchedRun, values: Values) -> dict[str, Any]:
    """Everything about one completion, the others of its group, and the places of the matches
    before and behind it.  Raises NotThereError; TimeoutError where its file is not yet read.
    """
    place = number(values, "place", int)
    (completions,) = completions_of([run], values.get("kept", "0"))
    looks = 0
    while place is not None and place >= len(completions.index) and completions.progress < 1:
        completions.look()
        looks += 1
        if looks == MOST_LOOKS:
            raise TimeoutError(f"{completions.progress:.0%} of the file is read: ask again")
    if place is None or not 0 <= place < len(completions.index):
        raise NotThereError("there is no such completion any more")
    content = completions.read(place)
    missing = list[str]()
    if content.get("token_texts") is None and content.get("token_ids") is not None:
        content["token_texts"] = _decoded(run.root, content["token_ids"], missing)
    content["missing"] = missing + _missing(content)
    for key in ("token_texts", "log_probs", "advantages"):
        if isinstance(content.get(key), list):
            content[key] = content[key][:MOST_TOKENS]
    content.pop("token_ids", None)
    content.pop("routings", None)
    query = query_of(values)
    before, behind = (
        completions.find(query, place, backwards, most=1, seconds=NEIGHBOUR_S)[0]
        for backwards in (True, False)
    )
    return {
        **content,
        "place": place,
        "group": _group(completions, place),
        "previous": before[0][0] if before else None,
        "next": behind[0][0] if behind else None,
    }


def rewards_of_step(run: WatchedRun, values: Values) -> dict[str, Any]:
    """A histogram of the rewards of one step and source, by default of the last of training."""
    (completions,) = completions_of([run], values.get("kept", ""))
    sources = completions.index.sources
    source = values.get("source") or ("train" if "train" in sources else (*sources, "")[0])
    steps = completions.index.steps_of(source)
    step = number(values, "step", int)
    if step is None and len(steps):
        step = int(steps[-1])
    at = 0 if step is None else int(np.searchsorted(steps, step))
    rewards = completions.step_rewards(step, source) if step is not None else []
    name = "training" if source == "train" else source
    chart = draw_histogram(f"Rewards of step {step}, {name}", rewards)
    behind = at + 1 if at < len(steps) and steps[at] == step else at
    return {
        "html": "" if chart is None else fill("viewer.html", part="histogram", chart=chart),
        "step": step,
        "source": source,
        "sources": sources,
        "previous": int(steps[at - 1]) if at > 0 else None,
        "next": int(steps[behind]) if behind < len(steps) else None,
        "of_kept": completions is run.kept,
        "progress": completions.progress,
        "running": run.record().is_running,
    }


def pairs_of(runs: Sequence[WatchedRun], values: Values) -> dict[str, Any]:
    """The prompts that two runs have both answered at a step, by the mean reward of a group."""
    sides = completions_of(runs, values.get("kept", ""))
    known = [
        {
            (step, source)
            for source in side.index.sources
            for step in side.index.steps_of(source).tolist()
        }
        for side in sides
    ]
    common = sorted(known[0] & known[1])
    asked = number(values, "step", int), values.get("source", "")
    step, source = asked if asked in common else common[-1] if common else (None, None)
    answers = [{} if step is None else _answers(side, step, str(source)) for side in sides]
    both = [prompt for prompt in answers[0] if prompt in answers[1]]
    both = [prompt for prompt in both if not any(math.isnan(side[prompt][0]) for side in answers)]
    means = [[side[prompt][0] for side in answers] for prompt in both]
    gaps = [0.0 if are_level(pair) else pair[1] - pair[0] for pair in means]
    return {
        "common": [{"step": step, "source": source} for step, source in common[-1000:]],
        "step": step,
        "source": source,
        "of_kept": sides[0] is runs[0].kept,
        "count": len(gaps),
        "progress": min(side.progress for side in sides),
        "mean": fmean(gaps) if gaps else None,
        "error": stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else None,
        "rows": [
            {
                "prompt_id": prompt,
                "rewards": [side[prompt][0] for side in answers],
                "difference": gap,
                "places": [side[prompt][1] for side in answers],
                "prompt": _cut(sides[0].read(answers[0][prompt][1]).get("prompt")),
                "texts": [
                    _cut(side.read(answer[prompt][1]).get("completion"))
                    for side, answer in zip(sides, answers, strict=True)
                ],
            }
            for prompt, gap in zip(both[:MOST_PAIRS], gaps, strict=False)
        ],
    }


def _cut(text: Any) -> str:
    return in_a_line(str("" if text is None else text)[: 4 * SHORT], SHORT)


def _row(place: int, content: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the table of completions."""
    names = ("step", "source", "prompt_id", "reward", "finish_reason", "tokens", "advantage")
    turns = content.get("messages")
    return {
        "place": place,
        **{name: content.get(name) for name in names},
        "prompt": _cut(content.get("prompt")),
        "completion": _cut(content.get("completion")),
        "turns": sum(turn.get("role") == "assistant" for turn in turns if isinstance(turn, dict))
        if isinstance(turns, list)
        else None,
    }


def _missing(content: Mapping[str, Any]) -> list[str]:
    """Sentences on what the run has not recorded of a completion."""
    sentences, texts, length = list[str](), content.get("token_texts"), content.get("tokens")
    if not isinstance(texts, list) or not isinstance(content.get("log_probs"), list):
        sentences.append("Its tokens and log-probabilities are not recorded.")
    elif isinstance(length, int) and len(texts) < length:
        sentences.append(
            f"The first {len(texts):,} of its {length:,} tokens are recorded with their "
            "log-probabilities; tracking.completions keeps all of them."
        )
    wanted = {"advantage": "Its advantage is", "reward_parts": "Parts of its reward are"}
    for name, words in wanted.items():
        if name not in content and content.get("source") == "train":
            sentences.append(f"{words} not recorded here; tracking.completions records that.")
    return sentences


def _decoded(root: Path, token_ids: Sequence[int], missing: list[str]) -> list[str]:
    """The texts of tokens by the tokenizer of the run's model; their numbers where it has none."""
    if (root / "model").is_dir():
        from isobit.data.tokenizer import load_tokenizer

        with suppress(IsobitError, OSError, ValueError):
            tokenizer = load_tokenizer(root / "model")
            return [str(tokenizer.decode([token_id])) for token_id in token_ids[:MOST_TOKENS]]
    missing.append("The run has no finished model yet, so its tokens are shown as numbers.")
    return [f"[{token_id}]" for token_id in token_ids[:MOST_TOKENS]]


def _group(completions: Completions, place: int) -> list[dict[str, Any]]:
    """The completions beside it in the file that answer the same prompt in the same step."""
    index = completions.index
    key, first, last = index.key(place), place, place
    while first > 0 and index.key(first - 1) == key and place - first < MOST_OF_GROUP:
        first -= 1
    while last + 1 < len(index) and index.key(last + 1) == key and last - place < MOST_OF_GROUP:
        last += 1
    return [{"place": other, "reward": index.reward(other)} for other in range(first, last + 1)]


def _answers(completions: Completions, step: int, source: str) -> dict[str, tuple[float, int]]:
    """The mean reward of each prompt's group at a step, and the place of its first answer."""
    index = completions.index
    groups: dict[str, list[int]] = {}
    query = Query(source, first_step=step, last_step=step, order="oldest")
    for place in index.select(query).tolist():
        if index.key(place)[1] == source:
            groups.setdefault(index.key(place)[2], []).append(place)
    means = index.means
    answers: dict[str, tuple[float, int]] = {}
    for prompt, places in groups.items():
        valid = [mean for mean in means[places].tolist() if not math.isnan(mean)]
        answers[prompt] = fmean(valid) if valid else math.nan, places[0]
    return answers
