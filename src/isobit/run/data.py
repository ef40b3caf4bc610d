"""What a run reads beside its recipe: the prompts of reinforcement learning, the date for a chat
template that reads the clock, and a digest of everything that is read.

Every checkpoint records the digests, and a resume compares them (``isobit.store.compatible``): with
another reward, other data or another tokenizer the rest of a run would silently be another run.

    data.train.content            prompts: ids, tokens, and columns that a reward may read; of
                                  fine-tuning also what is learnt
    data.eval.NAME.content        likewise
    model.config                  bytes of config.json, unless the model starts from scratch
    model.tokenizer               all files of the tokenizer
    model.tokens                  which rows of lm_head are in the distribution
    model.generation              generation_config.json
    reward.function.source        the user's own code (``isobit.util.user_code``); of the parts of a
                                  reward it is reward.parts.NAME.function.source
    reward.rubric                 the file that a judge's rubric is in
    environment.class.source      the class of an environment, likewise
    environment.documents         names and contents of what ``search`` finds
    algorithm.source.content      an objective of the user's own

Weights are not among them: a checkpoint holds the policy's, and digests of all others
(``isobit.store.manifest.Extra``).
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from isobit.config.base import MAX_STEPS
from isobit.config.data import ChatConfig, DataSource
from isobit.config.environment import ENVIRONMENTS
from isobit.config.recipes import Recipe, RunConfig, SftConfig
from isobit.config.reward import WHOLE
from isobit.config.rollout import RolloutConfig
from isobit.config.tables import ON_MISMATCH, EvaluationConfig
from isobit.data.prompts import (
    Noticed,
    TooLong,
    build_prompts,
    check_any_left,
    describe_too_long,
    drop_evaluated,
    prompts_sha256,
)
from isobit.data.sampler import Spool, in_chunks
from isobit.data.sources import iter_rows
from isobit.data.tokenizer import CLOCK, mentions, reads_clock
from isobit.environments.shipped import documents_sha256
from isobit.models.folder import DescribedModel, model_folder, read_config
from isobit.parallel.world import ALONE, World, broadcast
from isobit.records.text import Prompt
from isobit.rewards.graders import GRADERS
from isobit.rewards.graders.judge import rubric_file
from isobit.rewards.grading import check_references
from isobit.store.checkpoint import MANIFEST, folders_by_step
from isobit.store.directory import RunDirectory
from isobit.util.errors import ConfigError
from isobit.util.files import file_sha256
from isobit.util.plain_files import read_plain
from isobit.util.user_code import source_sha256


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


Chat = TypeVar("Chat", bound=ChatConfig)
AnyRecipe = TypeVar("AnyRecipe", bound=RunConfig | SftConfig)


def now() -> datetime:
    return datetime.now().replace(microsecond=0)


def with_date(
    chat: Chat,
    folders: Sequence[Path],
    world: World = ALONE,
    known: Callable[[], datetime | None] = lambda: None,
) -> Chat:
    """With the date that is ``known``, or the time now, where no date is set and a chat template of
    the model ``folders`` reads the clock; the same on all ranks.
    """

    def date() -> str | None:
        reads = any(map(reads_clock, folders))
        return (known() or now()).isoformat() if reads else None

    if chat.date is not None:
        return chat
    found = broadcast(world, date)
    return chat if found is None else chat.model_copy(update={"date": _date(found)})


def with_date_of(
    config: AnyRecipe,
    model: str | Path,
    world: World = ALONE,
    known: Callable[[], datetime | None] = lambda: None,
    weights: bool = True,
) -> AnyRecipe:
    """A recipe with one date for the templates of ``model`` and of its reward models, as
    ``with_date`` chooses it.  Without ``weights`` those of a hub model are not fetched.
    """
    models: list[str | Path] = [model] if config.data.chat else []
    if config.reward is not None:
        models += [part.model for part in config.reward.named().values() if part.model is not None]
    folders = [model_folder(one, weights) for one in models]
    data = with_date(config.data, folders, world, known)
    return config if data is config.data else config.model_copy(update={"data": data})


def with_date_of_run(
    config: AnyRecipe, resume: bool, world: World = ALONE, *, weights: bool = True
) -> AnyRecipe:
    """A recipe with the date of its run: when that began, where it is resumed."""
    known = partial(_saved_date, RunDirectory(config.output)) if resume else lambda: None
    return with_date_of(config, config.model, world, known, weights)


def with_check_of_run(
    config: RunConfig,
    resume: bool,
    world: World = ALONE,
    say: Callable[[str], None] = lambda _: None,
) -> RunConfig:
    """A recipe that does at a mismatch what its run did so far, where it is resumed and the recipe
    leaves that open: runs of earlier versions warned by default, and go on so.
    """
    if not resume or config.check.on_mismatch != "auto":
        return config
    saved = broadcast(world, lambda: _saved(RunDirectory(config.output), "check", "on_mismatch"))
    if saved not in ON_MISMATCH:
        return config
    say(f'check.on_mismatch is "{saved}", as the run has recorded; set it to have another')
    check = config.check.model_copy(update={"on_mismatch": saved})
    return config.model_copy(update={"check": check})


def _saved_date(directory: RunDirectory) -> datetime | None:
    saved = _saved(directory, "data", "date")
    with suppress(ValueError, TypeError):
        return _date(saved)
    return None


def _saved(directory: RunDirectory, *keys: str) -> Any:
    """A setting in the run's manifest, or where that is lost, in its newest checkpoint's; None
    where neither has it.
    """
    checkpoints = folders_by_step(directory.checkpoints)
    newest_first = [checkpoints[step] / MANIFEST for step in sorted(checkpoints, reverse=True)]
    for path in (directory.manifest, *newest_first):
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            value = json.loads(read_plain(path))["config"]
            for key in keys:
                value = value[key]
            return value
    return None


def _date(text: str) -> datetime:
    return datetime.fromisoformat(text)


def settled(
    config: AnyRecipe, read: Callable[[AnyRecipe], Any], say: Callable[[str], None] = lambda _: None
) -> tuple[AnyRecipe, Any]:
    """The recipe with what a model and its data decide where the recipe leaves it open:
    ``rollout.max_new_tokens``, which is at most half of a small context, and ``training.steps``,
    where ``data.epochs`` is set. It is settled before anything compares or records the recipe.
    Also the data, where they had to be read for it, which ``read`` then need not read again.

    Raises ConfigError where ``training.steps`` is set as well, to another number, and what
    ``read``, which plans the training, raises.
    """
    rollout = config.rollout
    if config.reward is not None and "max_new_tokens" not in rollout.model_fields_set:
        shape = config.from_scratch if isinstance(config, SftConfig) else None
        half = (shape or read_config(model_folder(config.model, False))).max_positions // 2
        if half < rollout.max_new_tokens:
            say(
                f"completions have at most {half} tokens, half of the model's context; another "
                "limit is rollout.max_new_tokens"
            )
            rollout = rollout.model_copy(update={"max_new_tokens": half})
            config = config.model_copy(update={"rollout": rollout})
    epochs, training = config.data.epochs, config.training
    if epochs is None:
        return config, None
    data = read(config).data
    rows, per_step = len(data.prompts), training.prompts_per_step
    steps = math.ceil(epochs * rows / per_step)
    if "steps" in training.model_fields_set and training.steps != steps:
        raise ConfigError(
            f"data.epochs is {epochs:g}, which is {steps} steps of {per_step} of the {rows} "
            f"training prompts, but training.steps is {training.steps}; leave one of them out"
        )
    if steps > MAX_STEPS:
        raise ConfigError(
            f"data.epochs is {epochs:g}, which is {steps:,} steps; a run has at most "
            f"{MAX_STEPS:,}: lower it, or raise training.prompts_per_step"
        )
    training = training.model_copy(update={"steps": steps})
    say(f"data.epochs = {epochs:g} of {rows} prompts: {steps} steps of {per_step}")
    return config.model_copy(update={"training": training}), data


_TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
)
_ABSENT = "absent"


def digests(
    config: Recipe, folder: Path, from_scratch: bool, content: Mapping[str, str]
) -> dict[str, str]:
    """Of a training whose data has the digests ``content``, by set.  Raises OSError for a file that
    cannot be read.
    """
    files = {
        **({} if from_scratch else {"model.config": ("config.json",)}),
        "model.tokenizer": _TOKENIZER,
        "model.generation": ("generation_config.json",),
    }
    return {
        **{f"data.{name}.content": digest for name, digest in content.items()},
        **{name: _files_sha256(folder, patterns) for name, patterns in files.items()},
        **dict(_sources(config)),
    }


def _sources(config: Recipe) -> Iterator[tuple[str, str]]:
    parts = {} if config.reward is None else config.reward.named()
    for name, part in parts.items():
        key = "reward" if name == WHOLE else f"reward.parts.{name}"
        if part.function is not None and part.function not in GRADERS:
            yield f"{key}.function.source", source_sha256(part.function) or _ABSENT
        if part.function == "llm_judge" and (path := rubric_file(part.options.get("rubric", ""))):
            yield f"{key}.rubric", file_sha256(path) if path.is_file() else _ABSENT
    environment = config.environment if isinstance(config, RunConfig) else None
    is_file = environment is not None and environment.openenv is None
    if environment is not None and is_file and environment.place not in ENVIRONMENTS:
        yield f"environment.{environment.kind}.source", source_sha256(environment.place) or _ABSENT
    if environment is not None and environment.factory == "search":
        yield "environment.documents", documents_sha256(**environment.options)
    own = config.algorithm if isinstance(config, RunConfig) else None
    if own is not None and own.name == "custom":
        yield "algorithm.source.content", source_sha256(own.source) or _ABSENT


def _files_sha256(folder: Path, patterns: tuple[str, ...]) -> str:
    """Of the names and bytes of the files that match."""
    paths = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    if not paths:
        return _ABSENT
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(f"{path.name}\n{file_sha256(path)}\n".encode())
    return digest.hexdigest()
