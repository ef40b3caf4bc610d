"""The data of a training: what it learns from, without the rows whose prompt is evaluated, and each
evaluation set, with what an engine is asked for on it.

Reinforcement learning learns from prompts, fine-tuning from examples or from pairs of answers.
``data.streaming`` keeps the rows to learn from in a temporary file.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from transformers import PreTrainedTokenizerBase

from isobit.config import recipes
from isobit.config.data import ChatConfig, DataConfig, SftDataConfig
from isobit.config.recipes import RunConfig
from isobit.config.rollout import RolloutConfig
from isobit.config.tables import EvaluationConfig
from isobit.config.training import OptimisationConfig
from isobit.data.chat_template import CLOCK, mentions
from isobit.data.examples import (
    Example,
    Pair,
    build_examples,
    build_pairs,
    iter_answered,
    iter_turns,
)
from isobit.data.prompts import (
    Noticed,
    TooLong,
    build_prompts,
    check_any_left,
    describe_too_long,
    learnt_sha256,
    prompts_sha256,
    too_long_of,
)
from isobit.data.sources import iter_rows
from isobit.data.spool import Mapped, Spool, in_chunks
from isobit.models.folder import DescribedModel, SamplingModel
from isobit.records.text import Prompt
from isobit.rewards.reference_check import check_references
from isobit.rollout.episodes import Tools
from isobit.rollout.requests import Request
from isobit.run.acting import grades_by_environment, open_environments, read_tools
from isobit.util.errors import ModelError
from isobit.util.terminal import counted

Lesson: TypeAlias = Example | Pair
"""What fine-tuning learns from: an example of supervised fine-tuning, a pair of preferences."""
Item = TypeVar("Item", bound=Prompt | Lesson)
Build: TypeAlias = Callable[[str, Any, Noticed, int], Sequence[Item]]
"""What a set holds, of its name and its source, or of rows from one with a number on; what is too
long or stands out is counted in the record.
"""


def prompt_of(item: Prompt | Lesson) -> Prompt:
    return item if isinstance(item, Prompt) else item.prompt


@dataclass(frozen=True, slots=True)
class TrainingData(ABC, Generic[Item]):
    """All data of a training."""

    train: Mapping[str, Item]
    """What is learnt from, by the id of its prompt; a ``Spool`` where it is streamed."""
    dropped: int
    """Rows left out of ``train`` because an evaluation set holds their prompt too."""
    sets: Mapping[str, Sequence[Item]]
    """What each evaluation set holds."""
    noticed: Mapping[str, Noticed]
    """What was too long or stood out in each set."""
    notes: Sequence[str]
    """Lines on references that no grader can use, and on how prompts were rendered."""

    @property
    def items(self) -> Sequence[Item]:
        """What is learnt from, in the order of the rows."""
        return in_order(self.train)

    @property
    def prompts(self) -> Sequence[Prompt]:
        """The prompts to learn from, in the order of the rows."""
        return Mapped(self.items, prompt_of)

    @property
    def graded(self) -> dict[str, Sequence[Prompt]]:
        """The prompts to which completions may be graded, by the key of their set."""
        return {f"data.eval.{name}": Mapped(of, prompt_of) for name, of in self.sets.items()}

    def digests(self) -> dict[str, str]:
        """SHA-256 of each set."""
        sets = {"train": self.items, **{f"eval.{name}": of for name, of in self.sets.items()}}
        return {name: self._digest(items) for name, items in sets.items()}

    @abstractmethod
    def _digest(self, items: Sequence[Item]) -> str:
        """SHA-256 of prompts, and of what is to be learnt behind them."""

    def _figures(self, items: str, evaluated: str) -> dict[str, Any]:
        """How many there are of each, for the manifest, under names for both kinds of sets."""
        return {
            f"training_{items}": len(self.train),
            f"dropped_{items}": self.dropped,
            evaluated: {name: len(of) for name, of in self.sets.items()},
            "too_long": too_long_of(self.noticed),
        }

    def _described(self, items: str, evaluated: str) -> str:
        """One line: how many there are of each, with words for both kinds of sets, and what was
        left out or cut.
        """
        sets = ", ".join(f"{len(of)} in {name}" for name, of in self.sets.items())
        dropped = (
            f" ({self.dropped} more also stand in an evaluation set: dropped)"
            if self.dropped
            else ""
        )
        streamed = f"; {self.train.describe()}" if isinstance(self.train, Spool) else ""
        return (
            f"data: {counted(len(self.train), items)}{dropped}{evaluated}: {sets or 'none'}"
            f"{describe_too_long(self.noticed)}{streamed}"
        )


def in_order(train: Mapping[str, Item]) -> Sequence[Item]:
    """What is learnt from, in the order of the rows."""
    return train.items_in_order if isinstance(train, Spool) else list(train.values())


@dataclass(frozen=True, slots=True)
class RlData(TrainingData[Prompt]):
    """All prompts of a run of reinforcement learning."""

    tools: Tools | None = None
    """The environment's, with which chat templates were rendered."""

    @property
    def graded(self) -> dict[str, Sequence[Prompt]]:
        """The prompts to which completions are graded, by the key of their set."""
        evaluated = {f"data.eval.{name}": prompts for name, prompts in self.sets.items()}
        return {"data.train": self.prompts, **evaluated}

    def _digest(self, items: Sequence[Prompt]) -> str:
        return prompts_sha256(items)

    def figures(self) -> dict[str, Any]:
        """How many there are of each, for the manifest."""
        return self._figures("prompts", "evaluation_problems")

    def describe(self, training: OptimisationConfig) -> str:
        """One line: how many training prompts and evaluation problems there are, what was left out
        or cut, and whether a step has a prompt more than once.
        """
        line, count = self._described("training prompts", "; evaluation problems"), len(self.train)
        wanted = training.prompts_per_step
        if wanted <= count:
            return line
        return (
            f"{line}; warning: a step takes {wanted} prompts (training.prompts_per_step), so that "
            f"it has the same prompt up to {-(-wanted // count)} times"
        )


@dataclass(frozen=True, slots=True)
class SftData(TrainingData[Lesson]):
    """All examples of a run of fine-tuning, or all pairs."""

    objective: recipes.Objective

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that training can meet; of both in a pair, which is never
        cut.
        """
        return max(example.tokens for example in self.items)

    @property
    def noun(self) -> str:
        """What one of them is called, in the plural."""
        return "pairs" if self.objective == "preference" else "examples"

    def _digest(self, items: Sequence[Lesson]) -> str:
        return learnt_sha256(Mapped(items, prompt_of), (item.learnt for item in items))

    def figures(self) -> dict[str, Any]:
        """How many there are of each, for the manifest."""
        return self._figures("examples", "held_out_examples")

    def describe(self, training: OptimisationConfig) -> str:
        """One line: how many there are, and how often each is gone through."""
        passes = training.steps * training.prompts_per_step / len(self.train)
        times = f"{passes:.2g}" if passes < 99.5 else f"{passes:,.0f}"
        seen = "once" if times == "1" else f"{times} times"
        return self._described(self.noun, f", each seen {seen}; held out")


def load_prompts(config: RunConfig, model: DescribedModel) -> RlData:
    """Read and tokenise all sets, with the tools of the environment where there is one, and see
    whether the reward can use their references.  Raises DataError for what cannot be used,
    RewardError as ``check_references`` does, and what ``open_environments`` and ``read_tools``
    raise.
    """
    data, tools = config.data, _tools(config, model)
    schemas = tools.schemas if tools is not None else ()

    def building(new_tokens: int) -> Build[Prompt]:
        def build(name: str, source: Any, noticed: Noticed, first: int) -> Sequence[Prompt]:
            context = model.config.max_positions
            return build_prompts(
                name, source, model.tokenizer, data, context, new_tokens, noticed, first, schemas
            )

        return build

    sets = _read_sets(
        data,
        building(config.rollout.max_new_tokens),
        building(evaluation_limit(config.evaluation, config.rollout)),
        lambda: iter_rows(data.train),
    )
    graded = {f"data.eval.{name}": prompts for name, prompts in sets.evaluated.items()}
    notes = [
        *check_references(config.reward, {"data.train": in_order(sets.train), **graded}),
        *rendering_notes(data, model.tokenizer, sets.noticed),
    ]
    return RlData(sets.train, sets.dropped, sets.evaluated, sets.noticed, notes, tools)


def _tools(config: RunConfig, model: DescribedModel) -> Tools | None:
    if config.environment is None:
        return None
    stops = model.sampling(config.rollout).stop_token_ids
    with open_environments(config.environment, model.tokenizer) as environments:
        return read_tools(
            environments,
            config.environment,
            config.data,
            model.tokenizer,
            stops,
            grades_by_environment(config.reward),
        )


def load_examples(config: recipes.SftConfig, model: DescribedModel) -> SftData:
    """Read and tokenise all sets, and see whether the reward can use the references of those that
    are held out.  Raises DataError for what cannot be used, RewardError as ``check_references``
    does, ModelError for a tokenizer of another model.
    """
    data, objective = config.data, config.objective
    of_pairs = objective == "preference"

    def build(name: str, source: Any, noticed: Noticed, first: int) -> Sequence[Lesson]:
        tokenizer, context = model.tokenizer, model.config.max_positions
        if of_pairs:
            made = build_pairs(name, source, tokenizer, data, context, noticed, first)
            ids = chain.from_iterable(chain(*pair.learnt) for pair in made)
        else:
            stops = model.stop_token_ids
            made = build_examples(name, source, tokenizer, stops, data, context, noticed, first)
            ids = chain.from_iterable((*one.prompt.token_ids, *one.learnt) for one in made)
        _check_vocabulary(max(ids, default=0), model)
        return made

    def rows() -> Iterable[Any]:
        return iter_answered(data.train) if of_pairs else iter_turns(data.train)

    sets = _read_sets(data, build, build, rows)
    notes = rendering_notes(data, model.tokenizer, sets.noticed)
    read = SftData(sets.train, sets.dropped, sets.evaluated, sets.noticed, notes, objective)
    return replace(read, notes=[*check_references(config.reward, read.graded), *notes])


def _check_vocabulary(largest: int, model: DescribedModel) -> None:
    if largest >= model.config.vocab_size:
        raise ModelError(
            f"{model.folder}: the tokenizer gives the token {largest}, but the model knows 0 to "
            f"{model.config.vocab_size - 1}: the tokenizer belongs to another model"
        )


class _Sets(NamedTuple, Generic[Item]):
    """The fields of ``TrainingData`` that are read."""

    train: Mapping[str, Item]
    dropped: int
    evaluated: Mapping[str, Sequence[Item]]
    noticed: Mapping[str, Noticed]


def _read_sets(
    data: DataConfig | SftDataConfig,
    build: Build[Item],
    build_evaluated: Build[Item],
    rows: Callable[[], Iterable[Any]],
) -> _Sets[Item]:
    """Read all sets: ``build`` makes what is learnt from, of the source or, where it is streamed,
    of chunks of its ``rows``.  Raises DataError where nothing is left to learn from.
    """
    seen = Noticed(TooLong(data.too_long, in_parts=data.streaming))
    whole = () if data.streaming else build("train", data.train, seen, 0)
    noticed, evaluated = {"train": seen}, dict[str, Sequence[Item]]()
    for name, source in data.eval.items():
        noticed[name] = Noticed(TooLong(data.too_long))
        evaluated[name] = build_evaluated(name, source, noticed[name], 0)
    texts = {prompt_of(item).text for items in evaluated.values() for item in items}
    dropped = 0

    def streamed() -> Iterator[Item]:
        first = 0
        for chunk in in_chunks(rows()):
            yield from build("train", chunk, seen, first)
            first += len(chunk)

    def kept(items: Iterable[Item]) -> Iterator[Item]:
        nonlocal dropped
        for item in items:
            if prompt_of(item).text in texts:
                dropped += 1
            else:
                yield item

    train: Mapping[str, Item]
    if data.streaming:
        train = Spool(kept(streamed()), lambda item: prompt_of(item).id)
    else:
        train = {prompt_of(item).id: item for item in kept(whole)}
    check_any_left("train", train, dropped, seen.too_long)
    return _Sets(train, dropped, evaluated, noticed)


def evaluation_limit(evaluation: EvaluationConfig, rollout: RolloutConfig) -> int:
    """The most tokens of a completion in an evaluation."""
    return evaluation.max_new_tokens or rollout.max_new_tokens


def evaluation_requests(
    sets: Mapping[str, Sequence[Prompt]],
    evaluation: EvaluationConfig,
    rollout: RolloutConfig,
    model: SamplingModel | DescribedModel,
) -> dict[str, list[Request]]:
    """What an engine is asked for on each set, by name: ``rollout`` with what ``evaluation`` says
    otherwise.
    """
    changed = {
        "temperature": evaluation.temperature,
        "max_new_tokens": evaluation_limit(evaluation, rollout),
        "top_p": rollout.top_p if evaluation.top_p is None else evaluation.top_p,
    }
    sampling = model.sampling(rollout.model_copy(update=changed))
    return {
        name: [Request(prompt, 0, evaluation.samples, sampling) for prompt in prompts]
        for name, prompts in sets.items()
    }


def rendering_notes(
    chat: ChatConfig, tokenizer: PreTrainedTokenizerBase, noticed: Mapping[str, Noticed]
) -> list[str]:
    """Lines on the date that the chat template writes, and on what was noticed of each set."""
    lines: list[str] = []
    if chat.chat and chat.date is not None and mentions(tokenizer, CLOCK):
        lines.append(f"the chat template reads the date, which is {chat.date} here (data.date)")
    return lines + [line for name, seen in noticed.items() for line in seen.lines(name)]
