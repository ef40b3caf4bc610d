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

Where rollouters are killed, and our launcher starts them again (``isobit.parallel.parts``), the
trainers lose nothing: they have the order of prompts, the records, the open groups, and in host
memory the weights of the last question, as they were.  They send these and ask again.  With a lag
the answer has the bytes that it would have had.  Freely another batch may be chosen.  Once it is,
it stays: it is drawn again as the line of its step says, up to what had ended when it was chosen,
and nothing more is drawn in that step.  What the tools of an environment say is recorded once all
of a step is drawn; where they were asked again for its batch, what they have said then is recorded.
What trainers take over is a whole answer or nothing of it.

An error of any rank is raised on all at the next meeting.  A signal is answered while the trainers
stand between two steps: with a lag between two questions, since they learn while a batch is
sampled; freely also while a batch is drawn, which they wait for.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch

from isobit.models.kept_weights import KeptWeights
from isobit.models.policy import Policy
from isobit.observe.evaluation import EvalResult
from isobit.parallel.parts import Parts
from isobit.parallel.world import (
    World,
    broadcast_from,
    encode,
    is_raised_on_all,
    raised_on_all,
    run_and_gather,
)
from isobit.records.text import Group
from isobit.records.wire import groups_of
from isobit.run.agreement import check_alike
from isobit.run.evaluation import Evaluation, Evaluator
from isobit.run.recorded_inputs import RecordedInputs
from isobit.store.manifest import environment
from isobit.store.training_run import TrainingRun
from isobit.util.errors import Interrupted, MismatchError, PeerError

Asked = Literal["batch", "chosen", "open", "evaluation", "few"]
"""What trainers ask for: the next batch, compared; freely the batch of a step, and what is drawn
while it is learnt from; every evaluation set; the beginnings of a few answers.
"""
_LEARNT = "learnt"
"""The note that says that the trainers have."""


@dataclass(slots=True)
class Question:
    """What trainers ask for, and what has come of it."""

    content: Mapping[str, Any]
    more: Callable[[], Mapping[str, Any]] = dict
    """What those need to know beside it who have come back, and have sampled nothing yet."""
    answer: Mapping[str, Any] | None = None
    is_repeated: bool = False
    """Whether those who have come back have answered it, too."""
    late_answers: Sequence[str] = ()
    """What an environment has said, of which only the second answer has a line."""

    def again(self) -> dict[str, Any]:
        """The question for those who have come back.  What was answered is drawn once more, as
        before: graded as it was, and as far as the line of its step says.
        """
        content = {**self.content, **self.more()}
        if self.answer is not None:
            given = self.answer["given"]
            said = given["answers"] or self.content["ahead"]["answers"]
            line = self.answer["line"]
            content["ahead"] = {**given, "answers": said, "schedule": [line]}
        return content

    def behind(self, before: "Question") -> dict[str, Any]:
        """The question for the same, where it follows from an answered one in the same step."""
        content = self.again()
        if before.answer is not None:
            content["ahead"] = {**content["ahead"], "schedule": [before.answer["line"]]}
        return content

    def take_repeated(self, answer: Mapping[str, Any]) -> None:
        """Note the second answer, which alone has the line of what an environment has said where
        the step's weights were to draw on after the first: that line comes with the answer that
        follows.  Raises MismatchError where it has other samples than the first, or where the
        environment has said something else than is noted already.
        """
        assert self.answer is not None
        given, said = self.answer["given"], answer["given"]["answers"]
        is_same = encode(answer["batch"]["groups"]) == encode(self.answer["batch"]["groups"])
        if not is_same or given["answers"] not in ([], said):
            raise _differs(
                "another batch than the one that the step learns from: tools of the environment "
                "said something else, or the machine is faulty"
            )
        self.is_repeated = True
        if not given["answers"]:
            self.late_answers = said
            self.answer = {**self.answer, "given": {**given, "answers": said}}

    def completed(self, following: Mapping[str, Any]) -> Mapping[str, Any]:
        """The answer that follows from this one, with what only the second one had.  Raises
        MismatchError where more, or less, was drawn than the line of the step says, by which the
        second one was drawn.
        """
        if self.answer is None or not self.is_repeated:
            return following
        given = following["given"]
        if given["schedule"] != [self.answer["line"]]:
            raise _differs(
                "more or fewer tokens than the line of the step says that they draw again: the "
                "machine is faulty, or this is an error of Isobit"
            )
        return {**following, "given": {**given, "answers": [*self.late_answers, *given["answers"]]}}


class Rollouters:
    """The two parts of a world, seen from a rank of either."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.trainers, self.is_rollouter = parts.trainers, parts.is_rollouter
        self.mine = parts.mine
        """The world of this rank's part."""
        self.have_open_groups = False
        """Whether the rollouters have the open groups of the run."""
        self._asked: list[Question] = []
        """What rollouters that come back are asked again: the last is not answered yet."""
        self._kept: KeptWeights | None = None
        self._checked: dict[str, Any] = {}
        """What is alike on all ranks."""
        self._is_over = False
        self._passed_on: int | None = None

    @property
    def whole(self) -> World:
        """Both parts.  Raises PeerError where rollouters are lost."""
        return self._parts.whole

    @property
    def can_replace(self) -> bool:
        """Whether rollouters that are killed come back, for whom trainers keep weights."""
        return self._parts.can_replace

    def come(self, check: Callable[[], None]) -> bool:
        """Rollouters: meet the trainers, where they do not know these; False where the run is
        done.  Raises what ``check`` raises.
        """
        return self._parts.come(check)

    def check_machines(self, device: torch.device, inputs: Mapping[str, str]) -> None:
        """All, before anything is sampled: refuse machines whose class of bits is not the first
        trainer's, and of those that have come back ``inputs`` of the run that have changed.  A
        rollouter compares its samples with its own forward, which would show neither.
        """
        bits = environment(device)["bits"]
        self._checked = {"host": self.mine.host, "bits": bits, "inputs": dict(inputs)}
        if self.is_rollouter:
            self._check_alike()
        elif not self._parts.reached(self._check_alike):
            self._meet_next()

    def _check_alike(self) -> None:
        check_alike(self._meet(lambda: self._checked))

    def _meet_next(self) -> None:
        """Trainers: meet rollouters that have come back."""
        while True:
            self._parts.next_whole()
            self._passed_on, self.have_open_groups = None, False
            if self._parts.reached(self._check_alike):
                return

    def ask(self, policy: Policy, question: Question, follows: bool = False) -> None:
        """Trainers: have the rollouters sample something by the weights as they are now.  A
        question that ``follows`` from the one before is of the same step, and needs what the
        rollouters know of that.
        """
        self._asked = [*(self._asked if follows else ()), question]
        if self._parts.can_replace:
            self._kept = self._kept or KeptWeights(policy)
            if self._kept.version != policy.version:
                self._kept.keep()
        if not self._send(policy, question.content):
            self._ask_again(policy)

    def _send(self, policy: Policy, content: Mapping[str, Any]) -> bool:
        """Ask, and pass the weights on where they are new; -> whether it has reached all."""
        is_new = self._passed_on != policy.version
        if not self._parts.reached(lambda: self._meet(lambda: {**content, "weights": is_new})):
            return False
        if is_new:
            if not self._parts.reached(lambda: policy.pass_on(self.whole, self.trainers)):
                return False
            self._passed_on = policy.version
        self.have_open_groups |= "open" in content
        return True

    def _ask_again(self, policy: Policy) -> None:
        """Trainers: meet rollouters that have come back, and ask for what is not answered yet, by
        the weights of its question.
        """
        while True:
            self._meet_next()
            assert self._kept is not None
            with self._kept.in_place():
                if self._repeat(policy):
                    return

    def _repeat(self, policy: Policy) -> bool:
        """Ask all again; -> whether it has reached all."""
        *answered, last = self._asked
        for question in answered:
            if not self._send(policy, question.again()):
                return False
            answer = self._receive()
            if answer is None:
                return False
            question.take_repeated(answer)
        content = last.behind(answered[-1]) if answered else last.again()
        return self._send(policy, content)

    @contextmanager
    def told_when_learnt(self) -> Iterator[None]:
        """Trainers: a block in which they ask for what is drawn while they learn, and learn."""
        board, is_first = self._parts.board, self.mine.rank == 0
        if is_first:
            board.remove(_LEARNT)
        try:
            yield
        finally:
            if is_first:
                board.post(_LEARNT, b"")

    def have_learnt(self) -> bool:
        """Rollouters: whether the trainers have left that block."""
        return self._parts.board.read(_LEARNT) is not None

    def receive(self, policy: Policy) -> Any:
        """Trainers: wait for what was asked for."""
        while (answer := self._receive()) is None:
            self._ask_again(policy)
        self._parts.note_answer()
        *before, last = self._asked
        last.answer = before[-1].completed(answer) if before else answer
        return last.answer

    def _receive(self) -> Any:
        """The answer; None where rollouters were lost before all trainers had it."""
        answers: list[Any] = []
        is_here = self._parts.reached(lambda: answers.append(self._travel(None)))
        return answers[0] if is_here else None

    def wait(self, policy: Policy, check: Callable[[], None]) -> Mapping[str, Any] | None:
        """Rollouters: wait for what they are to sample, and for the weights to sample it by; None
        where the trainers are done.  All end with what ``check`` raises.
        """
        asked = self._meet(check)[0]
        if asked is not None and asked["weights"]:
            policy.pass_on(self.whole, self.trainers)
        return asked

    def answer(self, make: Callable[[], dict[str, Any]]) -> None:
        """Rollouters: send what ``make`` returns, the same on each."""
        self._travel(make)

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
            self._parts.finish(lambda: self._meet(lambda: None))

    def _travel(self, make: Callable[[], Any] | None) -> Any:
        """What the first rollouter makes, on all ranks."""
        return broadcast_from(self.whole, self.trainers, make, self._meet)

    def _meet(self, attempt: Callable[[], Any]) -> list[Any]:
        """Every collective of the whole but the weights' is this one, so that an error of either
        part is met by whatever the other waits for.
        """
        try:
            return run_and_gather(self.whole, attempt)
        except BaseException as error:
            is_lost = isinstance(error, PeerError) and error.rank is None
            if self.is_rollouter or not (is_lost and self._parts.can_replace):
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


def ask_for(
    what: Asked,
    rollouters: Rollouters,
    run: AskingRun,
    follows: bool = False,
    anew: Callable[[], Mapping[str, Any]] = dict,
    **more: Any,
) -> None:
    """Trainers: ask for what comes next in the run, with ``more`` that the question needs, and
    ``anew`` in the place of some of it for rollouters that have come back.
    """
    state, ahead = run.sampler.state(), run.recorded.ahead()
    content = {"what": what, "sampler": state, "ahead": ahead, **more}
    rollouters.ask(run.model.policy, Question(content, anew), follows)


def receive_for(rollouters: Rollouters, run: AskingRun) -> dict[str, Any]:
    """Trainers: wait for it, and take over the order of prompts and what the run was given."""
    value = rollouters.receive(run.model.policy)
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


def _differs(how: str) -> BaseException:
    """The error of all trainers, which find the same in one answer."""
    text = f"rollouters that have come back have drawn {how}; go on with --resume"
    return raised_on_all(MismatchError(text))


def _raise(error: BaseException) -> None:
    raise error
