"""The prompts of reinforcement learning: those to learn from, and those of each evaluation set."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from isobit.config.data import ChatConfig, DataSource
from isobit.config.recipes import RunConfig
from isobit.config.rollout import RolloutConfig
from isobit.config.tables import EvaluationConfig
from isobit.data.chat_template import CLOCK, mentions
from isobit.data.prompts import (
    Noticed,
    TooLong,
    build_prompts,
    check_any_left,
    describe_too_long,
    drop_evaluated,
    prompts_sha256,
)
from isobit.data.sources import iter_rows
from isobit.data.spool import Spool, in_chunks
from isobit.models.folder import DescribedModel
from isobit.records.text import Prompt
from isobit.rewards.reference_check import check_references


@dataclass(frozen=True, slots=True)
class RlData:
    """All prompts of a run of reinforcement learning."""

    prompts: Sequence[Prompt]
    """Those to learn from, none of which stands in an evaluation set."""
    dropped: int
    """Training prompts left out because an evaluation set holds them too."""
    sets: Mapping[str, Sequence[Prompt]]
    """The problems of each evaluation set."""
    too_long: Mapping[str, TooLong] = field(default_factory=dict)
    """What was too long in each set, and what became of it."""
    notes: Sequence[str] = ()
    """Lines on references that no grader can use, and on how prompts were rendered."""
    spool: Spool[Prompt] | None = None
    """Where the prompts to learn from are, if they are streamed."""

    @property
    def by_id(self) -> Mapping[str, Prompt]:
        """The prompts to learn from."""
        if self.spool is not None:
            return self.spool
        return {prompt.id: prompt for prompt in self.prompts}

    def figures(self) -> dict[str, Any]:
        """How many there are of each, for the manifest."""
        return {
            "training_prompts": len(self.prompts),
            "dropped_prompts": self.dropped,
            "evaluation_problems": {name: len(prompts) for name, prompts in self.sets.items()},
            "too_long": {name: found.describe() for name, found in self.too_long.items()},
        }

    def digests(self) -> dict[str, str]:
        """SHA-256 of each set."""
        return {
            "train": prompts_sha256(self.prompts),
            **{f"eval.{name}": prompts_sha256(prompts) for name, prompts in self.sets.items()},
        }

    def describe(self, prompts_per_step: int) -> str:
        """One line: how many training prompts and evaluation problems there are, what was left out
        or cut, and whether a step has a prompt more than once.
        """
        sets = ", ".join(f"{len(prompts)} in {name}" for name, prompts in self.sets.items())
        dropped = (
            f" ({self.dropped} more also stand in an evaluation set: dropped)"
            if self.dropped
            else ""
        )
        return (
            f"data: {len(self.prompts)} training prompts{dropped}; evaluation problems: "
            f"{sets or 'none'}{describe_too_long(self.too_long)}"
            + (f"; {self.spool.describe()}" if self.spool is not None else "")
            + self._repeated(prompts_per_step)
        )

    def _repeated(self, prompts_per_step: int) -> str:
        if prompts_per_step <= len(self.prompts):
            return ""
        times = -(-prompts_per_step // len(self.prompts))
        return (
            f"; warning: a step takes {prompts_per_step} prompts (training.prompts_per_step), so "
            f"that it has the same prompt up to {times} times"
        )


def load_prompts(
    config: RunConfig, model: DescribedModel, tools: Sequence[Mapping[str, Any]] = ()
) -> RlData:
    """Read and tokenise all sets, and see whether the reward can use their references; chat
    templates are given the schemas of ``tools``.  Raises DataError for what cannot be used, and
    RewardError as ``check_references`` does.
    """
    data, too_long, noticed = config.data, dict[str, TooLong](), dict[str, Noticed]()

    def prompts_of(name: str, source: DataSource, new_tokens: int) -> list[Prompt]:
        counts = too_long[name] = TooLong(data.too_long)
        seen = noticed[name] = Noticed()
        context = model.config.max_positions
        return build_prompts(
            name, source, model.tokenizer, data, context, counts, new_tokens, seen, tools=tools
        )

    spool, train = None, list[Prompt]()
    if data.streaming:
        too_long["train"], noticed["train"] = TooLong(data.too_long, in_parts=True), Noticed()
    else:
        train = prompts_of("train", data.train, config.rollout.max_new_tokens)
    longest = evaluation_limit(config.evaluation, config.rollout)
    sets = {name: prompts_of(name, source, longest) for name, source in data.eval.items()}
    if data.streaming:
        spool, dropped = _spooled(config, model, sets, too_long["train"], noticed["train"], tools)
        prompts = spool.items_in_order
    else:
        prompts, dropped = drop_evaluated(train, sets.values())
    notes = [
        *check_references(config.reward, {"data.train": prompts, **_named(sets)}),
        *rendering_notes(data, model.tokenizer, noticed),
    ]
    return RlData(prompts, dropped, sets, _told(too_long), notes, spool)


def _told(too_long: Mapping[str, TooLong]) -> dict[str, TooLong]:
    return {name: one for name, one in too_long.items() if one.describe()}


def _spooled(
    config: RunConfig,
    model: DescribedModel,
    sets: Mapping[str, Sequence[Prompt]],
    too_long: TooLong,
    noticed: Noticed,
    tools: Sequence[Mapping[str, Any]],
) -> tuple[Spool[Prompt], int]:
    """The training prompts that are in no set, in a spool, and how many were left out."""
    held_out, dropped = {prompt.text for prompts in sets.values() for prompt in prompts}, 0

    def kept() -> Iterator[Prompt]:
        nonlocal dropped
        first, data, context = 0, config.data, model.config.max_positions
        longest = config.rollout.max_new_tokens
        for rows in in_chunks(iter_rows(data.train)):
            for prompt in build_prompts(
                "train",
                rows,
                model.tokenizer,
                data,
                context,
                too_long,
                longest,
                noticed,
                first,
                tools,
            ):
                if prompt.text not in held_out:
                    yield prompt
                else:
                    dropped += 1
            first += len(rows)

    spool = Spool(kept(), lambda prompt: prompt.id)
    check_any_left("train", spool, dropped, too_long)
    return spool, dropped


def _named(sets: Mapping[str, Sequence[Prompt]]) -> dict[str, Sequence[Prompt]]:
    return {f"data.eval.{name}": prompts for name, prompts in sets.items()}


def evaluation_limit(evaluation: EvaluationConfig, rollout: RolloutConfig) -> int:
    """The most tokens of a completion in an evaluation."""
    return evaluation.max_new_tokens or rollout.max_new_tokens


def rendering_notes(
    chat: ChatConfig, tokenizer: PreTrainedTokenizerBase, noticed: Mapping[str, Noticed]
) -> list[str]:
    """Lines on the date that the chat template writes, and on what was noticed of each set."""
    lines: list[str] = []
    if chat.chat and chat.date is not None and mentions(tokenizer, CLOCK):
        lines.append(f"the chat template reads the date, which is {chat.date} here (data.date)")
    return lines + [line for name, seen in noticed.items() for line in seen.lines(name)]
