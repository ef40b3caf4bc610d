"""The prompts of reinforcement learning: those to learn from, and those of each evaluation set."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from isobit.config.data import ChatConfig
from isobit.config.recipes import RunConfig
from isobit.config.rollout import RolloutConfig
from isobit.config.tables import EvaluationConfig
from isobit.data.chat_template import CLOCK, mentions
from isobit.data.prompts import Noticed, TooLong, build_prompts, describe_too_long, prompts_sha256
from isobit.data.sources import iter_rows
from isobit.data.spool import Spool
from isobit.models.folder import DescribedModel
from isobit.records.text import Prompt
from isobit.rewards.reference_check import check_references
from isobit.rollout.episodes import Tools
from isobit.run.acting import open_environments, read_tools
from isobit.run.data_sets import Build, read_data_sets


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
    """The temporary file of the prompts to learn from, where they are streamed."""
    tools: Tools | None = None
    """The environment's, with which chat templates were rendered."""

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


def load_prompts(config: RunConfig, model: DescribedModel) -> RlData:
    """Read and tokenise all sets, with the tools of the environment where there is one, and see
    whether the reward can use their references.  Raises DataError for what cannot be used,
    RewardError as ``check_references`` does, and what ``open_environments`` and ``read_tools``
    raise.
    """
    data, tools = config.data, _tools(config, model)
    schemas = tools.schemas if tools is not None else ()

    def building(new_tokens: int) -> Build[Prompt]:
        def build(
            name: str, source: Any, too_long: TooLong, noticed: Noticed, first: int
        ) -> Sequence[Prompt]:
            return build_prompts(
                name,
                source,
                model.tokenizer,
                data,
                model.config.max_positions,
                too_long,
                new_tokens,
                noticed,
                first,
                schemas,
            )

        return build

    sets = read_data_sets(
        data,
        building(config.rollout.max_new_tokens),
        building(evaluation_limit(config.evaluation, config.rollout)),
        lambda: iter_rows(data.train),
        lambda prompt: prompt,
    )
    prompts = sets.in_order
    notes = [
        *check_references(config.reward, {"data.train": prompts, **_named(sets.evaluated)}),
        *rendering_notes(data, model.tokenizer, sets.noticed),
    ]
    return RlData(prompts, sets.dropped, sets.evaluated, sets.too_long, notes, sets.spool, tools)


def _tools(config: RunConfig, model: DescribedModel) -> Tools | None:
    if config.environment is None:
        return None
    stops = model.sampling(config.rollout).stop_token_ids
    with open_environments(config.environment, model.tokenizer) as environments:
        return read_tools(environments, config.environment, config.data, model.tokenizer, stops)


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
