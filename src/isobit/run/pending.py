"""Batches between sampling and learning: with ``async.lag`` = k, sampling is k steps ahead.

    step t    policy        has the weights after step t - 1
              sample        batch t + k, at the end of the queue (in step 1: batches 1 to k + 1)
              compare       what was sampled with the trainer's forward, while it has these weights
              learn         batch t, from the front of the queue

So batch t is sampled wholly by the weights after step max(t - 1 - k, 0), and nothing is sampled
that no step will learn from.  Without a lag the queue holds one batch, and only between sampling
and learning.

A batch that has waited is off-policy and no longer *fresh*: its recorded log-probabilities are
exact for the weights that drew it, not for the trainer's current ones, and the loss's ratio is
taken to them.  The train-inference mismatch is therefore counted when the batch is sampled, over
some of its completions.

Between two steps the k waiting batches are part of a checkpoint: whole, as they were sampled and
graded, each as one message (``isobit.records.kept_groups``).  The figures of the engine and its
seconds stay with the step that sampled.

Trainers and rollouters on processes of their own (``cluster.rollouters``): while the first learn
from batch t, the last sample batch t + k, k = ``async.lag``.

    trainers      a world of their own, in which the run is what it is without rollouters: masters,
                  steps, files, the queue of batches; they sample nothing
    rollouters    published weights, engines and graders; they execute the trainers' commands one
                  after the other, and keep nothing between two (``isobit.run.loop``)

    step t        trainers                        rollouters
                  send the command "sample"       receive it
                  learn batch t                   sample, grade, compare batch t + k
                  receive batch t + k             send it
                  send the weights, version t     receive them

Both wait where they meet, and only there; a lag of 1 is enough to keep both busy.  Weights arrive
between two batches, in the tensors that the engine reads: a second set of them would let the bytes
travel while the engine decodes, and hide tens of milliseconds a step for as much memory as the
weights take.

The contents of a batch do not depend on who samples it: the bytes are those of one process with the
same lag.  The trainers' state says which prompts come next, and their record which rewards are
known; both are sent with the command "sample", and come back with the batch.

An error of any rank is raised on all at the next meeting.  A signal is answered between two
commands: the trainers learn while a batch is sampled, so a batch that was given up would take the
last moment between two steps with it.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch

from isobit.config.recipes import RunConfig
from isobit.models.policy import Policy
from isobit.observe.evaluation import EvalResult, result_of
from isobit.parallel.world import (
    World,
    broadcast_from,
    decode,
    encode,
    is_raised_on_all,
    run_and_gather,
)
from isobit.records.kept_groups import completions_of, groups_of, groups_value
from isobit.records.metrics import Metrics
from isobit.records.text import Completion, Group, Prompt
from isobit.rewards.tally import GradeStats
from isobit.rollout.engine_stats import EngineStats
from isobit.run.evaluate import Evaluation, Evaluator
from isobit.run.grading import RecordedGrading
from isobit.run.run import check_alike
from isobit.store.manifest import environment
from isobit.store.reward_record import AnswerRecord
from isobit.training.comparison import ComparedTokens, Comparison
from isobit.training.judge import scores_by_policy, with_old_columns
from isobit.training.step import Findings
from isobit.training.trainer import Trainer
from isobit.util.errors import CheckpointError, ConfigError, Interrupted


@dataclass(frozen=True, slots=True)
class GradedBatch:
    """The graded groups that one step learns from, and what it took to get them."""

    groups: list[Group]
    grades: GradeStats
    engine: EngineStats
    refills: int = 0
    """How often further prompts were taken."""
    dropped_groups: int = 0
    """Level groups that others replaced."""
    comparison: Comparison | None = None
    """Recorded against trained log-probabilities of some completions, by the weights that drew
    them; None where all are compared as they are learnt from.
    """
    mismatch: Metrics = field(default_factory=dict)
    """Of the same tokens."""

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


def pending_bytes(config: RunConfig) -> int:
    """The most that a checkpoint holds of the batches that wait."""
    training, lag = config.training, config.asynchrony.lag
    tokens = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    completions = training.prompts_per_step * training.samples_per_prompt
    return lag * completions * (tokens * TOKEN_BYTES + COMPLETION_BYTES)


class Pending:
    """The queue of batches, and what a checkpoint holds of it (``isobit.store.manifest.Extra``)."""

    def __init__(self, lag: int, steps: int, prompts: Mapping[str, Prompt]) -> None:
        """``prompts`` are all that the run learns from, by id."""
        self._lag, self._steps = lag, steps
        self._prompts = prompts
        self._waiting: deque[GradedBatch] = deque()
        self._first = 1
        """The step that learns from the front of the queue."""
        self._engine = EngineStats()

    def missing(self, step: int) -> range:
        """The batches to sample in a step, by the steps that will learn from them.  Without a lag
        that is the step's own: the queue is empty between steps, and no part of a checkpoint.
        """
        first = max(self._first + len(self._waiting), step)
        return range(first, min(step + self._lag, self._steps) + 1)

    def add(self, batch: GradedBatch) -> None:
        """Put a batch at the end of the queue."""
        self._engine += batch.engine
        self._waiting.append(batch)

    def compare(self, trainer: Trainer) -> None:
        """Compare the batches that have just been sampled, before a weight changes."""
        if self._lag:
            self._waiting = deque(
                batch if batch.comparison is not None else compared(batch, trainer)
                for batch in self._waiting
            )

    def findings(self) -> list[Findings]:
        """What the comparison of each batch has found, from the front on."""
        return [batch.findings for batch in self._waiting]

    def front(self) -> GradedBatch:
        """The batch that it is time to learn from."""
        batch = self._waiting[0]
        return replace(batch, groups=_stale(batch.groups)) if self._lag else batch

    def take_engine(self) -> EngineStats:
        """The engine's figures for the batches that were added since this was last called."""
        engine, self._engine = self._engine, EngineStats()
        return engine

    def drop_front(self) -> None:
        """Remove the batch that has been learnt from."""
        self._waiting.popleft()
        self._first += 1

    def state(self) -> dict[str, int]:
        """The batches that wait between two steps.  One at the end of the queue that was sampled in
        an unfinished step is not among them: it is sampled again with that step.
        """
        return {"first": self._first, "count": min(len(self._waiting), self._lag)}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Their messages, by the step that learns from them."""
        count = self.state()["count"]
        return {
            f"batch_{self._first + place}": torch.frombuffer(
                bytearray(encode(batch_value(self._waiting[place]))), dtype=torch.uint8
            )
            for place in range(count)
        }

    def restore(self, state: Mapping[str, int], tensors: Mapping[str, torch.Tensor]) -> None:
        """Go on with the batches of ``tensors``.  Raises CheckpointError for one of other
        prompts.
        """
        self._first = state["first"]
        numbers = range(self._first, self._first + state["count"])
        self._waiting = deque(
            self.batch_of(decode(bytes(tensors[f"batch_{number}"].numpy()))) for number in numbers
        )

    def batch_of(self, value: Mapping[str, Any]) -> GradedBatch:
        """The batch of ``batch_value``."""
        return GradedBatch(
            groups_of(value["groups"], self._prompt),
            GradeStats(**value["grades"]),
            EngineStats(),
            value["refills"],
            value["dropped_groups"],
            Comparison(**value["comparison"]),
            value["mismatch"],
        )

    def _prompt(self, name: str) -> Prompt:
        if name not in self._prompts:
            raise CheckpointError(
                f"a batch that waits has the prompt {name}, which is not among those that the run "
                "learns from; resume with the same data files"
            )
        return self._prompts[name]


def batch_value(batch: GradedBatch) -> dict[str, Any]:
    """A batch that has been compared, as ``isobit.parallel.world`` takes it; without what the
    engine did.
    """
    assert batch.comparison is not None, "a batch that waits has been compared"
    return {
        "groups": groups_value(batch.groups),
        "grades": asdict(batch.grades),
        "refills": batch.refills,
        "dropped_groups": batch.dropped_groups,
        "comparison": asdict(batch.comparison),
        "mismatch": batch.mismatch,
    }


def compared(batch: GradedBatch, trainer: Trainer) -> GradedBatch:
    """A batch with the comparison of the completions of some indices, the same in any run: evenly
    spaced, so that prompts and places in their groups vary.
    """
    drawn = [completion.sequence for group in batch.groups for completion in group.completions]
    drawn = [sequence for sequence in drawn if sequence.response_length]
    count = min(COMPARED, len(drawn))
    chosen = [drawn[place * len(drawn) // count] for place in range(count)]
    tokens = ComparedTokens.none()
    for sequence, scores in zip(chosen, scores_by_policy(trainer, chosen), strict=True):
        tokens.add_sequence(with_old_columns(sequence, scores))
    return replace(batch, comparison=tokens.comparison(), mismatch=tokens.mismatch())


def _stale(groups: Sequence[Group]) -> list[Group]:
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


class Rollouters:
    """The two parts of a world, seen from a rank of either."""

    def __init__(self, whole: World, rollouters: int) -> None:
        """All ranks of ``whole`` make it together; the last ``rollouters`` of them sample."""
        self.trainers = whole.size - rollouters
        self.is_rollouter = whole.rank >= self.trainers
        self.whole = whole
        self.mine = whole.split([0, self.trainers, whole.size])
        """The world of this rank's part."""
        self._is_over = False
        self._passed_on: int | None = None

    def check_machines(self, device: torch.device) -> None:
        """All, before anything is sampled: refuse machines whose class of bits is not the first
        trainer's.  A rollouter compares its samples with its own forward, which would not show it.
        """
        mine = {"host": self.mine.host, "bits": environment(device)["bits"]}
        check_alike(self._meet(lambda: mine))

    def send_command(self, command: Mapping[str, Any]) -> None:
        """Trainers: say what the rollouters are to do."""
        self._meet(lambda: command)

    def receive_command(self, check: Callable[[], None]) -> dict[str, Any]:
        """Rollouters: wait for the next command; all end with what ``check`` raises."""
        return self._meet(check)[0]

    def send_result(self, make: Callable[[], Any]) -> None:
        """Rollouters: send what ``make`` returns, the same on each."""
        self._travel(make)

    def receive_result(self) -> Any:
        """Trainers: wait for what the rollouters send."""
        return self._travel(None)

    def update_weights(self, policy: Policy) -> None:
        """Trainers: have the rollouters sample by the current weights."""
        if self._passed_on != policy.version:
            self.send_command({"do": "take weights"})
            self.transfer_weights(policy)

    def sample_few(self, policy: Policy, sampler: Mapping[str, Any]) -> list[Completion]:
        """Trainers: have the rollouters sample ``RlRun.sample_few`` by the current weights, from
        the state of the order of prompts.
        """
        self.update_weights(policy)
        self.send_command({"do": "probe", "sampler": sampler})
        return completions_of(self.receive_result())

    def transfer_weights(self, policy: Policy) -> None:
        """All: send the published weights from the trainers to the rollouters."""
        policy.pass_on(self.whole, self.trainers)
        self._passed_on = policy.version

    @contextmanager
    def errors_shared(self) -> Iterator[None]:
        """A block that all ranks enter.  An error of one part ends the other at the next meeting;
        where the trainers are done, the rollouters are.
        """
        try:
            yield
        except BaseException as error:
            if not self._is_over and self._is_of_all(error):
                with suppress(Exception, Interrupted):
                    self._meet(partial(_raise, error))
            raise
        if not self.is_rollouter:
            self.send_command({"do": "end"})

    def _travel(self, make: Callable[[], Any] | None) -> Any:
        """What the first rollouter makes, on all ranks."""
        return broadcast_from(self.whole, self.trainers, make, self._meet)

    def _meet(self, attempt: Callable[[], Any]) -> list[Any]:
        """Every collective of the whole but the weights' is this one, so that an error of either
        part is met by whatever the other waits for.
        """
        try:
            return run_and_gather(self.whole, attempt)
        except BaseException:
            self._is_over = True
            raise

    def _is_of_all(self, error: BaseException) -> bool:
        """Whether all ranks of this part end with it."""
        if not isinstance(error, (Exception, Interrupted)):
            return False
        return self.mine.size == 1 or is_raised_on_all(error)


@dataclass(frozen=True, slots=True)
class Given:
    """What a run is given from outside, in records that go to the rollouters and come back with
    more (``isobit.store.reward_record``).
    """

    grading: RecordedGrading
    answers: AnswerRecord
    write_answers: Callable[[], None]

    def ahead(self) -> dict[str, list[str]]:
        """What the records of an interrupted run still have of rollouts to come."""
        records = {"gradings": self.grading.record, "answers": self.answers}
        return {
            name: [line.decode() for line in record.lines_ahead] for name, record in records.items()
        }

    def append(self, found: Mapping[str, Sequence[str]]) -> None:
        """What the rollouters were given, repeated or new.  All ranks together."""
        self.grading.append([line.encode() for line in found["gradings"]])
        self.answers.append([line.encode() for line in found["answers"]])
        self.write_answers()


def evaluate(
    rollouters: Rollouters, policy: Policy, evaluator: Evaluator, given: Given
) -> Evaluation[EvalResult]:
    """Trainers: every evaluation set under the current policy, sampled by the rollouters."""
    rollouters.update_weights(policy)
    rollouters.send_command({"do": "evaluate", "ahead": given.ahead()})
    value = rollouters.receive_result()
    given.append(value["given"])
    found: dict[str, tuple[EvalResult, list[Group]]] = {}
    gradings = [
        json.loads(line) for line in value["given"]["gradings"]
    ]  # one of each set, in their order
    for (name, requests), graded in zip(evaluator.requests.items(), gradings, strict=True):
        prompts = {request.prompt.id: request.prompt for request in requests}
        groups = groups_of(value["sets"][name], prompts.__getitem__)
        stats = GradeStats(0, 0, graded["failures"], None, graded.get("counts", {}))
        found[name] = result_of(groups, requests[0].samples, stats.all_counts()), groups
    return found


def check_parts(config: RunConfig, world: World) -> None:
    """Refuse a layout that this world cannot have.  Raises ConfigError."""
    rollouters = config.cluster.rollouters
    if rollouters >= world.size:
        processes = "1 process" if world.size == 1 else f"{world.size} processes"
        raise ConfigError(
            f"cluster.rollouters is {rollouters}, but the run has {processes}, of which at least "
            "one has to train; start more (--cluster.processes N), or set cluster.rollouters = 0, "
            "with which all sample and train in turn: the bytes are the same"
        )


def _raise(error: BaseException) -> None:
    raise error
