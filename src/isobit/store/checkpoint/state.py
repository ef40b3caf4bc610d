"""What a run is between two steps: taken from it for a checkpoint, and put back.

    tensors    FP32 masters, AdamW's moments, and those of the extras, each of which has a state of
               its own too (``isobit.store.training_run.Extra``)
    counters   the trainer's updates and skipped steps, the version of the weights
    cursors    the sampler's epoch and place, and the size of every file that grows
               (``isobit.store.journal``)
    budget     the tokens a micro-batch, as far as out-of-memories have lowered them
    log        evaluations so far, totals and seconds of the summary

The counters and cursors are taken after every step and every evaluation, the tensors only when a
checkpoint is written: a step that is abandoned has moved the cursors, but no tensor.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from isobit.errors import CheckpointError
from isobit.models.policy import Policy
from isobit.models.tensor_file import TensorFile
from isobit.parallel.agreement import together
from isobit.store.checkpoint.format import Checkpoint, Snapshot
from isobit.store.checkpoint.share import Share
from isobit.store.manifest import environment
from isobit.store.training_run import TrainingRun
from isobit.training.budget import BudgetChange

TRAINED_ON = "data.train.content"
"""The input that is learnt from, by its name (``isobit.run.inputs``)."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """A moment between two steps: everything but the tensors."""

    step: int
    """Steps done."""
    state: Mapping[str, Any]
    """Ready for JSON."""
    evaluation: Mapping[str, float]
    """Figures of the evaluation after this step, empty without one."""


def take_boundary(
    step: int,
    run: TrainingRun,
    log: Mapping[str, Any],
    positions: Mapping[str, int],
    evaluation: Mapping[str, float],
) -> Boundary:
    """The run as it stands; ``log`` is the log's own state, and ``positions`` what rank 0 sees."""
    state = {
        "step": step,
        "weights_version": run.model.policy.version,
        "trainer": run.trainer.counters(),
        "budget": [asdict(change) for change in run.trainer.budget.changes],
        "sampler": run.sampler.state(),
        "prompts_sha256": run.inputs[TRAINED_ON],
        "files": dict(positions),
        "log": log,
        "extras": _extra_states(run),
    }
    return Boundary(step, state, dict(evaluation))


def holds(boundary: Boundary, run: TrainingRun) -> bool:
    """Whether the tensors still are those of the boundary: no update was taken, or begun, and no
    extra has changed since.
    """
    state = boundary.state
    return (
        run.trainer.is_whole
        and run.model.policy.version == state["weights_version"]
        and _extra_states(run) == state["extras"]
    )


def snapshot(boundary: Boundary, run: TrainingRun) -> Snapshot:
    """The boundary with the rank's share of the tensors, which must be its own."""
    assert holds(boundary, run), "the weights have moved since the boundary was taken"
    policy = run.model.policy
    share = _share(policy)
    description = {
        # Without the processes, which change no byte of a checkpoint.
        "config": run.config.model_dump(mode="json", exclude={"cluster"}),
        "environment": environment(policy.device),
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
    """Put a freshly prepared run where the checkpoint was taken, by all ranks together, however
    many have written it: each reads its share.  Of ``other_prompts`` than it had a new epoch
    begins.

    Raises CheckpointError for tensors that are not this model's, and for extras that cannot be what
    they were.
    """
    state, policy = checkpoint.state, run.model.policy
    share = _share(policy)
    masters, moments = together(policy.world, lambda: _open_tensors(checkpoint, run))
    policy.restore(share.own_masters(masters), state["weights_version"])
    run.trainer.restore(state["trainer"], share.own_moments(moments))
    run.trainer.budget.changes = [BudgetChange(**change) for change in state.get("budget", [])]
    run.sampler.restore(state["sampler"], other_prompts)
    together(policy.world, lambda: _restore_extras(checkpoint, run))


def _share(policy: Policy) -> Share:
    return Share(policy.shapes, policy.ownership, policy.world.rank)


def _open_tensors(checkpoint: Checkpoint, run: TrainingRun) -> tuple[TensorFile, TensorFile]:
    """Masters and moments, checked to be this run's."""
    masters, moments = checkpoint.tensors()
    _check_shapes(checkpoint, run.model.policy.shapes, masters.shapes())
    return masters, moments


def _extra_states(run: TrainingRun) -> dict[str, Any]:
    return {name: dict(extra.state()) for name, extra in run.extras.items()}


def _restore_extras(checkpoint: Checkpoint, run: TrainingRun) -> None:
    states, files = checkpoint.state.get("extras", {}), checkpoint.extras()
    for name in sorted(states.keys() ^ run.extras.keys()):
        where = "the checkpoint" if name in states else "the run"
        raise CheckpointError(
            f"{checkpoint.folder}: only {where} has a {name}: it is not a checkpoint of this run"
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
                "the folder `model` has "
                f"{expected.get(name)}: it is not the model that this run began with"
            )
