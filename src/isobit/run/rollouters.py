"""Trainers and rollouters on processes of their own (``cluster.rollouters``): while the first learn
from batch t, the last sample batch t + k, k = ``async.lag``.

    trainers      a world of their own, in which the run is what it is without rollouters: masters,
                  steps, files, the queue of batches; they sample nothing
    rollouters    published weights, engines and graders; they sample what the trainers ask for, one
                  thing after the other (``isobit.run.rollouter_process``)

    in step t     trainers (``run.loop``)             rollouters (``run.rollouter_process``)
    meet          ``ask`` for a batch; new weights    ``wait``
    side by side  ``learn`` batch t                   ``collect``, compare batch t + k
    meet          ``receive`` batch t + k             ``answer``

Both wait where they meet, and only there; a lag of 1 is enough to keep both busy.  Weights arrive
with the first question after they have changed, in the tensors that the engine reads: a second set
of them would let the bytes travel while the engine decodes, and hide tens of milliseconds a step
for as much memory as the weights take.

Freely (``async.max_staleness``) rollouters draw as servers do (``isobit.run.free_batches``): they
answer as soon as a batch can be chosen, and draw on while the trainers learn from it, who note on
the board that they have.  Between two questions rollouters keep the open groups, and nothing else;
the trainers get these for their checkpoints.

    in step t     trainers                            rollouters
    meet          ``ask`` for the batch of step t     ``wait``
                                                      draw until it is chosen, grade it
    meet          ``receive`` it, ``ask`` for more    ``answer``
    side by side  ``learn`` from it                   draw on, then compare
    meet          ``receive`` the open groups         ``answer``

With a lag the contents of a batch do not depend on who samples it: the bytes are those of one
process with the same lag.  The trainers' state says which prompts come next, and their records
which rewards are known and who learns from what; they go with every question, and come back with
its answer.

An error of any rank is raised on all at the next meeting.  A signal is answered while the trainers
stand between two steps: with a lag between two questions, since they learn while a batch is
sampled; freely also while a batch is drawn, which they wait for.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Literal, Protocol

import torch

from isobit.models.policy import Policy
from isobit.observe.evaluation import EvalResult
from isobit.parallel.world import World, broadcast_from, is_raised_on_all, run_and_gather
from isobit.records.text import Group
from isobit.records.wire import groups_of
from isobit.run.agreement import check_alike
from isobit.run.evaluation import Evaluation, Evaluator
from isobit.run.recorded_inputs import RecordedInputs
from isobit.store.manifest import environment
from isobit.store.training_run import TrainingRun
from isobit.util.errors import Interrupted

Asked = Literal["batch", "chosen", "open", "evaluation", "few"]
"""What trainers ask for: the next batch, compared; freely the batch of a step, and what is drawn
while it is learnt from; every evaluation set; the beginnings of a few answers.
"""
_LEARNT = "learnt"
"""The note that says that the trainers have."""


class Rollouters:
    """The two parts of a world, seen from a rank of either."""

    def __init__(self, whole: World, rollouters: int) -> None:
        """All ranks of ``whole`` make it together; the last ``rollouters`` of them sample."""
        self.trainers = whole.size - rollouters
        self.is_rollouter = whole.rank >= self.trainers
        self.whole = whole
        self.mine = whole.split([0, self.trainers, whole.size])
        """The world of this rank's part."""
        self.have_open_groups = False
        """Whether the rollouters have the open groups of the run."""
        self._is_over = False
        self._passed_on: int | None = None

    def check_machines(self, device: torch.device) -> None:
        """All, before anything is sampled: refuse machines whose class of bits is not the first
        trainer's.  A rollouter compares its samples with its own forward, which would not show it.
        """
        mine = {"host": self.mine.host, "bits": environment(device)["bits"]}
        check_alike(self._meet(lambda: mine))

    def ask(self, policy: Policy, question: Mapping[str, Any]) -> None:
        """Trainers: have the rollouters sample something by the weights as they are now."""
        is_new = self._passed_on != policy.version
        self._meet(lambda: {**question, "weights": is_new})
        if is_new:
            self._pass_on(policy)

    @contextmanager
    def told_when_learnt(self) -> Iterator[None]:
        """Trainers: a block in which they ask for what is drawn while they learn, and learn."""
        board, is_first = self.whole.board, self.mine.rank == 0
        if is_first:
            board.remove(_LEARNT)
        try:
            yield
        finally:
            if is_first:
                board.post(_LEARNT, b"")

    def have_learnt(self) -> bool:
        """Rollouters: whether the trainers have left that block."""
        return self.whole.board.read(_LEARNT) is not None

    def receive(self) -> Any:
        """Trainers: wait for what was asked for."""
        return self._travel(None)

    def wait(self, policy: Policy, check: Callable[[], None]) -> Mapping[str, Any] | None:
        """Rollouters: wait for what they are to sample, and for the weights to sample it by; None
        where the trainers are done.  All end with what ``check`` raises.
        """
        asked = self._meet(check)[0]
        if asked is not None and asked["weights"]:
            self._pass_on(policy)
        return asked

    def answer(self, make: Callable[[], dict[str, Any]]) -> None:
        """Rollouters: send what ``make`` returns, the same on each."""
        self._travel(make)

    def _pass_on(self, policy: Policy) -> None:
        """All: the published weights go from the trainers to the rollouters."""
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
            self._meet(lambda: None)

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


class AskingRun(TrainingRun, Protocol):
    """A run whose samples rollouters draw."""

    @property
    def recorded(self) -> RecordedInputs: ...


def ask_for(what: Asked, rollouters: Rollouters, run: AskingRun, **more: Any) -> None:
    """Trainers: ask for what comes next in the run, with ``more`` that the question needs."""
    state, ahead = run.sampler.state(), run.recorded.ahead()
    rollouters.ask(run.model.policy, {"what": what, "sampler": state, "ahead": ahead, **more})


def receive_for(rollouters: Rollouters, run: AskingRun) -> dict[str, Any]:
    """Trainers: wait for it, and take over the order of prompts and what the run was given."""
    value = rollouters.receive()
    run.sampler.restore(value["sampler"])
    run.recorded.append(value["given"])
    return value


def evaluation_of(value: Mapping[str, Any], evaluator: Evaluator) -> Evaluation[EvalResult]:
    """Every evaluation set, from a rollouter's answer."""
    figures: dict[str, tuple[EvalResult, list[Group]]] = {}
    for name, requests in evaluator.requests.items():
        prompts = {request.prompt.id: request.prompt for request in requests}
        groups = groups_of(value["groups"][name], prompts.__getitem__)
        figures[name] = EvalResult.from_json(value["figures"][name]), groups
    return figures


def _raise(error: BaseException) -> None:
    raise error
