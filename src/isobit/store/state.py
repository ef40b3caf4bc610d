"""The state of a run between two steps, for checkpoints, and the records of its steps.

A checkpoint saves and restores:

    tensors    FP32 masters, AdamW's moments, and the tensors of extras
               (``isobit.store.training_run.Extra``)
    counters   the trainer's updates and skipped steps, the version of the weights, and the scales
               of Q, K and V that go with it (``isobit.precision.kv_scales``); with LoRA the
               checksum of the base, of which nothing is saved
    cursors    the sampler's epoch and place, and the size of every file that grows
               (``isobit.store.journals``)
    budget     the tokens a micro-batch, as far as out-of-memories have lowered them, or a resume
               has allowed others
    log        evaluations so far, totals and seconds of the summary

Counters and cursors are taken after every step and evaluation, tensors only when a checkpoint is
written: an abandoned step has moved the cursors, but no tensor.

``digests.jsonl`` has a line for each step, with which ``isobit replay`` compares a repeated step:
three digests of the groups that it trained on (``isobit.records.digests``), and checksums of
the published weights, the FP32 masters and AdamW's state after it.  A line does not depend on the
number of processes.

    {"step": 7, "tokens": SHA-256, "log_probs": SHA-256, "rewards": SHA-256,
     "weights": checksum, "masters": checksum, "moments": checksum}
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from isobit.kernels.noise import num_groups
from isobit.models.policy import Policy
from isobit.models.safetensors import Slice, TensorFile, added_up, checksum, checksum_of
from isobit.parallel.ownership import Ownership
from isobit.parallel.world import run_on_all
from isobit.records.digests import group_digests
from isobit.records.text import Group
from isobit.store.checkpoint import Checkpoint, Snapshot
from isobit.store.directory import RunDirectory
from isobit.store.journals import read_lines
from isobit.store.training_run import TrainingRun
from isobit.training.budget import BudgetChange
from isobit.util.errors import CheckpointError
from isobit.util.strict_json import json_line

_STEP, _SCALE = "step", "_scale"


@dataclass(frozen=True, slots=True)
class CheckpointShare:
    """The part of a checkpoint's tensors that a rank owns.

    MASTER                      rows that ``isobit.parallel.ownership`` gives the rank
    MASTER.exp_avg, exp_avg_sq  the same rows
    MASTER.*_scale              the groups of 128 elements of these rows, which are whole
    MASTER.step                 the same number on all ranks; rank 0 writes it
    """

    shapes: Mapping[str, tuple[int, ...]]  # of whole masters
    ownership: Ownership
    rank: int

    def masters(self, own: Mapping[str, Tensor]) -> dict[str, Slice]:
        """The rank's masters, with their places in the whole ones."""
        return {
            name: Slice(self.shapes[name], self.ownership.rows(name, self.rank).start, rows)
            for name, rows in own.items()
        }

    def moments(self, own: Mapping[str, Tensor]) -> dict[str, Slice]:
        """The rank's moments (``Trainer.moments``), with their places in the whole ones."""
        return {key: self._moment(key, tensor) for key, tensor in own.items()}

    def own_masters(self, file: TensorFile) -> "OwnRows":
        """The rank's rows of a file of masters."""
        return OwnRows(file, {name: self.ownership.rows(name, self.rank) for name in file})

    def own_moments(self, file: TensorFile) -> "OwnRows":
        """The rank's rows of a file of moments."""
        return OwnRows(file, {key: self._rows(key) for key in file})

    def _moment(self, key: str, own: Tensor) -> Slice:
        rows = self._rows(key)
        if rows is None:
            return Slice.whole(own) if self.rank == 0 else Slice.none(own)
        name, _, kind = key.rpartition(".")
        shape = self.shapes[name]
        whole = (num_groups(prod(shape)),) if kind.endswith(_SCALE) else shape
        return Slice(whole, rows.start, own)

    def _rows(self, key: str) -> slice | None:
        """The rank's rows of a moment; None of a number that all ranks have."""
        name, _, kind = key.rpartition(".")
        if kind == _STEP:
            return None
        rows = self.ownership.rows(name, self.rank)
        if not kind.endswith(_SCALE):
            return rows
        width = prod(self.shapes[name][1:])
        return slice(num_groups(rows.start * width), num_groups(rows.stop * width))


class OwnRows(Mapping[str, Tensor]):
    """A rank's rows of the tensors of a file, mapped: no other row is read."""

    def __init__(self, file: TensorFile, rows: Mapping[str, slice | None]) -> None:
        """``rows`` of each tensor; None for all."""
        self._file, self._rows = file, rows

    def __getitem__(self, name: str) -> Tensor:
        rows, whole = self._rows[name], self._file[name]
        return whole if rows is None else whole[rows]

    def __iter__(self) -> Iterator[str]:
        return iter(self._file)

    def __len__(self) -> int:
        return len(self._file)


TRAINED_ON = "data.train.content"
"""The name of the input that the run trains on (``isobit.run.digests``)."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """The state between two steps, without the tensors."""

    step: int  # steps done
    state: Mapping[str, Any]  # serialisable as JSON
    evaluation: Mapping[str, float]  # figures of the evaluation after this step, empty without one


def take_boundary(
    step: int,
    run: TrainingRun,
    log: Mapping[str, Any],
    positions: Mapping[str, int],
    evaluation: Mapping[str, float],
) -> Boundary:
    """The run's state now; ``log`` is the log's own state, and ``positions`` those of rank 0."""
    state = {
        "step": step,
        "weights_version": run.model.policy.version,
        **({} if (scales := run.model.policy.kv_scales) is None else {"kv_scales": scales.state()}),
        **({} if (base := run.model.policy.base()) is None else {"base": base}),
        "trainer": run.trainer.counters(),
        "budget": [change.content() for change in run.trainer.budget.changes],
        "sampler": run.sampler.state(),
        "prompts_sha256": run.inputs[TRAINED_ON],
        "files": dict(positions),
        "log": log,
        "extras": _extra_states(run),
    }
    return Boundary(step, state, dict(evaluation))


def holds(boundary: Boundary, run: TrainingRun) -> bool:
    """Whether the tensors are the boundary's: no update was begun, and no extra has changed."""
    state = boundary.state
    return (
        run.trainer.is_whole
        and run.model.policy.version == state["weights_version"]
        and _extra_states(run) == state["extras"]
    )


def snapshot(boundary: Boundary, run: TrainingRun, environment: Mapping[str, Any]) -> Snapshot:
    """The boundary with this rank's tensors, which must still be the boundary's; ``environment`` is
    ``isobit.store.manifest.environment`` of this process.
    """
    assert holds(boundary, run), "the weights have moved since the boundary was taken"
    policy = run.model.policy
    share = _share(policy)
    description = {
        # Without the processes, which change no byte of a checkpoint.
        "config": run.config.model_dump(mode="json", exclude={"cluster"}),
        "environment": environment,
        "inputs": dict(run.inputs),
        "evaluation": boundary.evaluation,
    }
    return Snapshot(
        boundary.step,
        share.masters(policy.masters),
        share.moments(run.trainer.moments()),
        boundary.state,
        description,
        {name: extra.tensors() for name, extra in run.extras.items()},
    )


def restore(checkpoint: Checkpoint, run: TrainingRun, other_prompts: bool = False) -> None:
    """Put a newly prepared run into the checkpoint's state, on all ranks together; any number of
    ranks may have written it.  With ``other_prompts`` than before, a new epoch begins.

    Raises CheckpointError for tensors that are not this model's, and for extras that cannot be
    restored.
    """
    state, policy = checkpoint.state, run.model.policy
    share = _share(policy)

    def open_tensors() -> tuple[TensorFile, TensorFile]:
        masters, moments = checkpoint.tensors()
        _check_shapes(checkpoint, policy.shapes, masters.shapes())
        return masters, moments

    masters, moments = run_on_all(policy.world, open_tensors)
    _check_base(checkpoint, policy)
    policy.restore(share.own_masters(masters), state["weights_version"])
    if policy.kv_scales is not None and "kv_scales" in state:  # not after another flow
        policy.kv_scales.restore(state["kv_scales"])
    run.trainer.restore(state["trainer"], share.own_moments(moments))
    run.trainer.budget.changes = [BudgetChange(**change) for change in state["budget"]]
    run.sampler.restore(state["sampler"], other_prompts)
    run_on_all(policy.world, lambda: _restore_extras(checkpoint, run))


def _check_base(checkpoint: Checkpoint, policy: Policy) -> None:
    """Refuse another base under the adapters of a checkpoint."""
    then, now = checkpoint.state.get("base"), policy.base()
    if then is None or now is None or then["back_end"] != now["back_end"]:
        return
    if then != now:
        raise CheckpointError(
            f"{checkpoint.folder}: the adapters were trained on a model whose published weights "
            f"have the checksum {then['checksum']}, and those of the folder `model` have "
            f"{now['checksum']}: put the folder's old files back, or start a new run (--output "
            "PATH)"
        )


def _share(policy: Policy) -> CheckpointShare:
    return CheckpointShare(policy.shapes, policy.ownership, policy.world.rank)


def _extra_states(run: TrainingRun) -> dict[str, Any]:
    return {name: dict(extra.state()) for name, extra in run.extras.items()}


_DECIDED_BY = {
    "open_groups": "async.max_staleness (of which 0 leaves none open)",
    "pending": "async.lag",
    "replay": "replay.fraction",
}
"""The keys of the extras that may be named in --allow-change."""


def _restore_extras(checkpoint: Checkpoint, run: TrainingRun) -> None:
    states, files = checkpoint.state["extras"], checkpoint.extras()
    for name in sorted(states.keys() ^ run.extras.keys()):
        where, other = "checkpoint", "run"
        if name not in states:
            where, other = other, where
        reason = "it is not a checkpoint of this run"
        if key := _DECIDED_BY.get(name):
            reason = f"{key} decides that, so set it to what it was"
        raise CheckpointError(
            f"{checkpoint.folder}: the {where} has {name}, and the {other} has none: {reason}"
        )
    for name, extra in run.extras.items():
        try:
            extra.restore(states[name], files.get(name, {}))
        except CheckpointError as error:
            raise CheckpointError(f"{checkpoint.folder}: {name}: {error}") from None


def _check_shapes(
    checkpoint: Checkpoint,
    expected: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
) -> None:
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise CheckpointError(
                f"{checkpoint.folder}: {name} has the shape {found.get(name)}, but the model in "
                f"the folder `model` has {expected.get(name)}: it is not the model that this run "
                "began with"
            )


@dataclass(frozen=True, slots=True)
class StateDigest:
    """Checksums (``isobit.models.safetensors``) of 16 hexadecimal digits."""

    weights: str
    masters: str
    moments: str


def state_digest(run: TrainingRun) -> StateDigest:
    """The digest of a run between two updates; collective, in the trainer's turn.  Each rank adds
    what it owns of masters and moments.

    Published weights are whole on all ranks and are compared.  Raises MismatchError, on all, where
    they differ: rollout and training would agree on them, so no log-probability shows it.
    """
    policy = run.model.policy
    share = _share(policy)
    masters = checksum(share.masters(policy.masters).items())
    moments = checksum(share.moments(run.trainer.moments()).items())
    _, weights = policy.compare(policy.world)
    checksums = policy.world.all_gather([masters, moments])
    return StateDigest(
        _digits(weights),
        _digits(added_up(of_masters for of_masters, _ in checksums)),
        _digits(added_up(of_moments for _, of_moments in checksums)),
    )


def checkpoint_digest(checkpoint: Checkpoint) -> dict[str, str]:
    """Checksums of the masters and the moments in a checkpoint's files."""
    masters, moments = checkpoint.tensors()
    return {"masters": _of_file(masters), "moments": _of_file(moments)}


def _of_file(tensors: Mapping[str, Tensor]) -> str:
    """One after another: a file may be larger than the memory."""
    return _digits(added_up(checksum_of({name: tensors[name]}) for name in tensors))


def _digits(checksum: int) -> str:
    return f"{checksum:016x}"


@dataclass(frozen=True, slots=True)
class StepDigests:
    """A line of ``digests.jsonl``."""

    step: int
    tokens: str
    log_probs: str
    rewards: str
    left: StateDigest

    @classmethod
    def of(cls, step: int, groups: Sequence[Group], left: StateDigest) -> Self:
        """The digests of the graded groups of a step and of the state after its update."""
        return cls(step, **group_digests(groups), left=left)

    def line(self) -> bytes:
        return json_line({"step": self.step, **self.by_name()})

    def by_name(self) -> dict[str, str]:
        """All digests, in the order in which a step makes what they are of."""
        return {
            "tokens": self.tokens,
            "log_probs": self.log_probs,
            "rewards": self.rewards,
            **asdict(self.left),
        }

    @classmethod
    def of_line(cls, content: Mapping[str, Any]) -> Self:
        """Raises KeyError and TypeError for a line that is damaged."""
        names = ("tokens", "log_probs", "rewards", "weights", "masters", "moments")
        digests = [content[name] for name in names]
        if not isinstance(content["step"], int) or not all(isinstance(d, str) for d in digests):
            raise TypeError
        tokens, log_probs, rewards, *left = digests
        return cls(content["step"], tokens, log_probs, rewards, StateDigest(*left))


def read_digests(root: Path) -> dict[int, StepDigests | None]:
    """The digests in a run's directory by step; None for a damaged line, whose step is the one
    after the line before it, or before the line after it.
    """
    found: dict[int, StepDigests | None] = {}
    damaged = 0
    for content in read_lines(RunDirectory(root).digests):
        line = None
        with suppress(KeyError, TypeError):
            line = StepDigests.of_line(content or {})
        if line is None and not found:
            damaged += 1
        elif line is None:
            found[max(found) + 1] = None
        else:
            found |= dict.fromkeys(range(line.step - damaged, line.step))
            found[line.step], damaged = line, 0
    return found
