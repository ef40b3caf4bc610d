"""Batches between sampling and learning, whoever draws them (``isobit.run.loop``) and whenever
(``isobit.records.schedule``).

    step t    policy        has the weights after step t - 1
              sample        the batches that the schedule has next, to the end of the queue: with
                            ``async.lag`` = k batch t + k (in step 1: batches 1 to k + 1), else the
                            one that the step learns from
              compare       some of what was sampled with the trainer's forward, while it has these
                            weights
              learn         batch t, from the front of the queue

Nothing is sampled that no step will learn from.

A batch that has waited, or that several versions of the weights drew, is off-policy and not
*fresh*: its recorded log-probabilities are exact for the weights that drew each token, not for the
trainer's current ones, and the loss's ratio is taken to them.  The train-inference mismatch is
therefore counted before the weights change, over some of its completions.

Between two steps the k waiting batches of a lag are part of a checkpoint: whole, as they were
sampled and graded, each as one message (``isobit.records.wire``).  The figures of the engine and
its seconds stay with the step that sampled.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch

from isobit.parallel.world import decode, encode
from isobit.records.metrics import Metrics
from isobit.records.schedule import Schedule
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Group, Prompt
from isobit.records.wire import completions_of, groups_of, groups_value
from isobit.rewards.grading import Grading
from isobit.rewards.tally import GradeStats
from isobit.rollout.engine_stats import EngineStats
from isobit.store.training_run import Dropped
from isobit.training.advantage_estimator import scores_by_policy, with_old_columns
from isobit.training.comparison import ComparedTokens, Comparison
from isobit.training.step import Findings, StepMetrics
from isobit.training.trainer import Trainer
from isobit.util.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class GradedBatch:
    """The graded groups that one step learns from, and what it took to get them."""

    groups: list[Group]
    grades: GradeStats
    engine: EngineStats
    refills: int = 0
    """Times that further prompts were taken."""
    dropped_groups: int = 0
    """Zero-variance groups that others replaced."""
    comparison: Comparison | None = None
    """Recorded against trained log-probabilities of some completions, by the weights that drew
    them; None where all are compared as they are learnt from.
    """
    mismatch: Metrics = field(default_factory=dict)
    """The train-inference mismatch of the same tokens."""
    to_compare: Sequence[TokenSequence] | None = None
    """What is compared where the schedule runs ahead; None for some of its own completions."""

    @property
    def findings(self) -> Findings:
        """What its comparison has found; nothing where it was not compared."""
        return Findings(self.comparison or Comparison(), self.mismatch)

    def __add__(self, other: "GradedBatch") -> "GradedBatch":
        """Both batches as one that is neither refilled nor compared."""
        return GradedBatch(
            [*self.groups, *other.groups], self.grades + other.grades, self.engine + other.engine
        )


COMPARED = 16
"""Completions of a batch that are compared, or all where it has no more."""
TOKEN_BYTES, COMPLETION_BYTES = 48, 1024
"""Upper bounds of what waits: a token with its log-probability, version, experts, reward and text;
and what a completion has whatever its length.
"""


def pending_bytes(completions: int, tokens: int) -> int:
    """The most that a checkpoint holds of so many completions that wait, each with its prompt of at
    most so many ``tokens``.
    """
    return completions * (tokens * TOKEN_BYTES + COMPLETION_BYTES)


class Pending:
    """The queue of batches, and its state in checkpoints (``isobit.store.training_run.Extra``)."""

    def __init__(
        self, schedule: Schedule, prompts: Mapping[str, Prompt], can_regrade: bool = True
    ) -> None:
        """``prompts`` are all that the run learns from, by id.  Of greedy samples, which belong to
        a batch, only the reward is kept: with them it cannot be graded again.
        """
        self._schedule, self._prompts, self.can_regrade = schedule, prompts, can_regrade
        self._ungraded = False
        """Whether what waits has rewards of before."""
        self._waiting: deque[GradedBatch] = deque()
        self._first = 1
        """The step that learns from the front of the queue."""
        self.engine = EngineStats()
        """What engines did for batches, since it was last taken."""

    @property
    def is_ahead(self) -> bool:
        """Whether some of what is sampled is learnt from by other weights."""
        return self._schedule.ahead > 0

    def missing(self, step: int) -> range:
        """The batches that a written schedule samples in a step, by the steps that will learn from
        them.  Without a lag that is the step's own: the queue is empty between steps, and no part
        of a checkpoint.
        """
        first = max(self._first + len(self._waiting), step)
        return range(first, self._schedule.batches_begun(step - 1) + 1)

    def add(self, batch: GradedBatch) -> None:
        """Put a batch at the end of the queue."""
        self.engine += batch.engine
        self._waiting.append(batch)

    def compare(self, trainer: Trainer) -> None:
        """Compare what has just been sampled, before a weight changes."""
        if self._schedule.ahead:
            self._waiting = deque(
                batch if batch.comparison is not None else compared(batch, trainer)
                for batch in self._waiting
            )

    def note_findings(self, findings: Findings) -> None:
        """Those who drew the batch at the front have compared what they drew beside it."""
        comparison, mismatch = findings.comparison, findings.mismatch
        self._waiting[0] = replace(self._waiting[0], comparison=comparison, mismatch=mismatch)

    def with_findings(self, trained: StepMetrics) -> StepMetrics:
        """What a step did with the batch at the front, which was compared when it was sampled."""
        batch = self._waiting[0]
        if batch.comparison is None:
            return trained
        return replace(trained, comparison=batch.comparison, mismatch=batch.mismatch)

    def findings(self) -> list[Findings]:
        """What the comparison of each batch has found, from the front on."""
        return [batch.findings for batch in self._waiting]

    def front(self) -> GradedBatch:
        """The batch that it is time to learn from."""
        batch = self._waiting[0]
        return replace(batch, groups=stale(batch.groups)) if self._schedule.ahead else batch

    def take_engine(self) -> EngineStats:
        """The engines' figures since this was last called."""
        engine, self.engine = self.engine, EngineStats()
        return engine

    def end_step(self, step: int) -> None:
        """Remove the batch that the step has learnt from."""
        self._waiting.popleft()
        self._first = step + 1

    def state(self) -> dict[str, int]:
        """The batches that wait between two steps.  One at the end of the queue that was sampled in
        an unfinished step is not among them: it is sampled again with that step.
        """
        return {"first": self._first, "count": min(len(self._waiting), self._schedule.ahead)}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Their messages, by the step that learns from them."""
        count = self.state()["count"]
        return {
            f"batch_{self._first + index}": message_tensor(batch_value(self._waiting[index]))
            for index in range(count)
        }

    def restore(self, state: Mapping[str, int], tensors: Mapping[str, torch.Tensor]) -> None:
        """Go on with the batches of ``tensors``.  Raises CheckpointError for one of other
        prompts.
        """
        self._first = state["first"]
        numbers = range(self._first, self._first + state["count"])
        self._waiting = deque(
            self.batch_of(value_of(tensors[f"batch_{number}"])) for number in numbers
        )

    def regrade(self) -> None:
        self._ungraded = True

    def grade(self, grading: Grading) -> None:
        """Grade what waits again, where it has rewards of before.  Raises as ``grading`` does."""
        if self._ungraded:
            self._waiting = deque(_graded_again(batch, grading) for batch in self._waiting)
            self._ungraded = False

    def dropped(
        self, state: Mapping[str, int], tensors: Mapping[str, torch.Tensor], step: int, again: bool
    ) -> Dropped:
        """All batches: others are sampled in the next step."""
        batches = [value_of(tensors[name]) for name in tensors]
        samples = [one for batch in batches for one in completions_of(batch["groups"])]
        prompts = sum(len(one["groups"]["groups"]) + one["dropped_groups"] for one in batches)
        tokens = sum(sample.length for sample in samples)
        return Dropped({**state, "count": 0}, len(samples), tokens, prompts if again else 0)

    def batch_of(self, value: Mapping[str, Any]) -> GradedBatch:
        """The batch of ``batch_value``.  Raises CheckpointError for one of other prompts."""
        comparison = value["comparison"]
        groups = groups_of(value["groups"], lambda name: prompt_of(self._prompts, name))
        for group in groups:
            check_prompt(group.prompt, group.completions)
        return GradedBatch(
            groups,
            GradeStats(**value["grades"]),
            EngineStats(),
            value["refills"],
            value["dropped_groups"],
            None if comparison is None else Comparison(**comparison),
            value["mismatch"],
        )


def message_tensor(value: Mapping[str, Any]) -> torch.Tensor:
    """A message (``isobit.parallel.world``) as uint8, for a checkpoint."""
    return torch.frombuffer(bytearray(encode(value)), dtype=torch.uint8)


def value_of(message: torch.Tensor) -> Any:
    """What ``message_tensor`` was given."""
    return decode(bytes(message.numpy()))


def prompt_of(prompts: Mapping[str, Prompt], name: str) -> Prompt:
    """The prompt of a sample that waits, among those that the run learns from.  Raises
    CheckpointError.
    """
    if name not in prompts:
        raise CheckpointError(
            f"a sample that waits has the prompt {name}, which is not among those that the run "
            "learns from; resume with the same data files"
        )
    return prompts[name]


def _graded_again(batch: GradedBatch, grading: Grading) -> GradedBatch:
    groups = [replace(group, rewards=[], reward_parts={}) for group in batch.groups]
    return replace(batch, groups=groups, grades=grading(groups))


def check_prompt(prompt: Prompt, completions: Iterable[Completion]) -> None:
    """Raise CheckpointError for a sample that does not begin with the tokens of its prompt.  Not
    of an environment, which may have opened it.
    """
    expected = np.asarray(prompt.token_ids)
    for completion in completions:
        found = completion.sequence.token_ids[: len(expected)]
        if completion.episode is None and not np.array_equal(found, expected):
            raise CheckpointError(
                f"a sample that waits was drawn for another prompt than {prompt.id} is now: its "
                "first tokens are others; resume with the same data files and the same tokenizer"
            )


def batch_value(batch: GradedBatch) -> dict[str, Any]:
    """A batch as ``isobit.parallel.world`` takes it; without what the engine did, and without what
    is to be compared.
    """
    comparison = batch.comparison
    return {
        "groups": groups_value(batch.groups),
        "grades": asdict(batch.grades),
        "refills": batch.refills,
        "dropped_groups": batch.dropped_groups,
        "comparison": None if comparison is None else asdict(comparison),
        "mismatch": batch.mismatch,
    }


def compared(batch: GradedBatch, trainer: Trainer) -> GradedBatch:
    """A batch with the comparison of what it says, or of the completions of some indices, the same
    in any run: evenly spaced, so that prompts and places in their groups vary.
    """
    sequences = batch.to_compare
    if sequences is None:
        own = [completion.sequence for group in batch.groups for completion in group.completions]
        sequences = spread([sequence for sequence in own if sequence.response_length])
    comparison, mismatch = compared_sequences(trainer, sequences)
    return replace(batch, comparison=comparison, mismatch=mismatch)


Item = TypeVar("Item")


def spread(items: Sequence[Item]) -> list[Item]:
    """``COMPARED`` of the items, evenly spaced, or all where there are no more."""
    count = min(COMPARED, len(items))
    return [items[index * len(items) // count] for index in range(count)]


def compared_sequences(
    trainer: Trainer, sequences: Sequence[TokenSequence]
) -> tuple[Comparison, Metrics]:
    """Recorded against trained log-probabilities of sequences, by the weights as they are; and
    their train-inference mismatch.
    """
    tokens = ComparedTokens.none()
    for sequence, scores in zip(sequences, scores_by_policy(trainer, sequences), strict=True):
        tokens.add_sequence(with_old_columns(sequence, scores))
    return tokens.comparison(), tokens.mismatch()


def stale(groups: Sequence[Group]) -> list[Group]:
    """The groups with completions that other weights drew than those that learn from them."""
    return [
        replace(
            group,
            completions=[
                replace(completion, sequence=replace(completion.sequence, fresh=False))
                for completion in group.completions
            ],
        )
        for group in groups
    ]
