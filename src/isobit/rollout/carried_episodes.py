"""Episodes that stay open while steps learn (``isobit.rollout.open_groups``).

    withdraw   an episode leaves the engine with the tokens that it has; what the environment has
               said behind the last drawn token waits beside it
    admit      the episode is gone through again by what is known of it: its tokens, and the answers
               to its turns; then the engine goes on where it stood

An answer is *used* once a token behind it has been drawn.  The answers that were used in a step are
recorded with it, whenever they came; what has ended an episode is recorded with the step that
learns from it.  So what is recorded of a step depends on its schedule alone.  A checkpoint holds
the used answers of open episodes, and one that an answer has ended as half done.  Where an engine
draws on while a step learns (``isobit.run.free_batches``), the step's answers are recorded after
that.

The process of an episode stays between two steps, and runs its calls while a step learns.  It is
gone after an interruption, or where a server has no room for others: then a new one is told of all
turns, and runs their calls again, when it is next asked.  An answer that had come and was not used
is asked for again after an interruption.

Nothing is asked before the next step of the engine: an episode that the schedule stops at the end
of a turn asks nothing, since its answer is recorded with a later step.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from isobit.environments.pool import AnswerLog, TurnAnswer
from isobit.parallel.world import World
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, FinishReason
from isobit.rollout.engine import Follow, SampleEvent
from isobit.rollout.engine_stats import Periods
from isobit.rollout.episodes import TICK_S, Episodes, OpenEpisode
from isobit.rollout.open_groups import OpenGroup
from isobit.rollout.requests import Handle, Request, requests_of
from isobit.util.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class OpenHandle(Handle):
    """The name of an episode that may stay open, for its environment: it equals no handle, so an
    evaluation whose prompts have the same names does not meet its process.
    """


@dataclass(slots=True)
class _Process:
    """What the process of an episode was told."""

    asked: Sequence[Any] = ()
    """The key of the last question."""
    is_over: bool = False
    """Whether that was for the episode's reward."""
    waits: bool = False
    """Whether its answer is still to come."""
    follows: bool = False
    """Whether the question belongs to the episode as it is now."""
    seconds: float = 0.0


@dataclass(slots=True)
class _Answer:
    key: Sequence[Any]
    content: Mapping[str, Any]
    is_new: bool = True
    """Whether it is not recorded yet."""


class CarriedEpisodes(Episodes):
    """``Episodes`` of which all leave the engine half done and come back."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._processes: dict[Handle, _Process] = {}
        self._known: dict[Handle, dict[str, _Answer]] = {}
        """Answers by their keys, until a step learns from the episode."""
        self._to_ask: dict[Handle, bool] = {}
        """What the next step asks, with whether the reward is wanted."""
        self._bare: dict[Handle, TokenSequence] = {}
        """The prompts without what the environment has said for them."""
        self._drawing: set[Handle] = set()
        """Episodes with a turn in the engine."""
        self._reasons: dict[Handle, FinishReason] = {}
        """The finish reason of the last turn that has ended."""
        self._stopped: dict[Handle, tuple[int, FinishReason]] = {}
        """Episodes that stand at the end of a turn, or that an answer there has ended: their drawn
        tokens, and the turn's reason.
        """
        self._step: tuple[int, Sequence[tuple[str, int]]] = 0, ()
        """The version of the weights and the prompts of the step."""
        self._gone_through: Handle | None = None
        """The episode that is being gone through again, for which nothing is drawn."""

    # A step.

    def take_log(self, answers: AnswerLog) -> None:
        """Look answers up in this record from now on, in the middle of a step those of the step."""
        self._answers = answers
        answers.begin(*self._step)

    def begin_step(self, weights_version: int, prompts: Sequence[tuple[str, int]]) -> None:
        """The answers of a step that draws these prompts come next."""
        self._step = weights_version, prompts
        self._answers.begin(weights_version, prompts)

    def end_step(self, world: World, groups: Sequence[OpenGroup], learnt: Collection[int]) -> None:
        """Record the answers that were used, of groups as they are now, some of which, by their
        places, the step learns from.  All ranks together.
        """
        used, stopped = list[Any](), list[Any]()
        for place, handle, completion in _samples(groups):
            is_learnt = place in learnt
            new = [one for one in self._used(handle, completion, is_learnt) if one.is_new]
            used += [[_listed(handle), one.key, one.content] for one in new]
            stop = None if is_learnt else self._stop_of(handle, completion)
            if stop is not None:
                stopped.append([_listed(handle), *stop])
        parts = [json.loads(part) for part in world.all_gather(json.dumps([used, stopped]))]
        self._answers.begin(*self._step)  # in a record that was taken since, too
        self._answers.end([(key, content) for part, _ in parts for _, key, content in part])
        for all_used, all_stopped in parts:
            for name, key, content in all_used:
                self._know(Handle(*name), key, content, is_new=False)
            self._stopped |= {Handle(*name): (length, why) for name, length, why in all_stopped}
        for place, handle, _ in _samples(groups):
            if place in learnt:
                self._known.pop(handle, None)
                self._stopped.pop(handle, None)

    def _used(self, handle: Handle, completion: Completion, is_learnt: bool) -> list[_Answer]:
        """The known answers that are recorded with a step, or with those before; the fourth part
        of a key is the number of turns that it answers.
        """
        known = sorted(self._known.get(handle, {}).values(), key=lambda one: one.key[3])
        turns = len(completion.sequence.turn_lengths)
        return [one for one in known if is_learnt or one.key[3] < turns]

    def _stop_of(self, handle: Handle, completion: Completion) -> tuple[int, FinishReason] | None:
        """What ``_stopped`` has of an episode that has not gone on since."""
        stop = self._stopped.get(handle)
        return stop if stop is not None and stop[0] == completion.length else None

    # Checkpoints.

    def kept(self, group: OpenGroup) -> OpenGroup:
        """The group as a checkpoint holds it: episodes that ended by an answer which is not
        recorded yet are half done there.
        """
        group, bare = group.copy(), _bare(group.request)
        for sample, completion in group.samples.items():
            if self._stop_of(group.handle(sample), completion) is not None:
                group.samples[sample] = _cut(completion.sequence, bare)
        return group

    def value(self, groups: Sequence[OpenGroup]) -> list[Any]:
        """What is known of the episodes of such groups beside their tokens, as a message."""
        return [
            [
                _listed(handle),
                list(self._stop_of(handle, completion) or ()),
                [[one.key, one.content] for one in self._used(handle, completion, False)],
            ]
            for _, handle, completion in _samples(groups)
            if completion.finish_reason == "aborted"
        ]

    def restore(self, value: Sequence[Any]) -> None:
        """Undo ``value``."""
        for name, stopped, answers in value:
            handle = Handle(*name)
            if stopped:
                self._stopped[handle] = (stopped[0], stopped[1])
            for key, content in answers:
                self._know(handle, key, content, is_new=False)

    def go_back(self, value: Sequence[Any], groups: Sequence[OpenGroup]) -> None:
        """Take the half-done episodes of these groups for what ``value`` has."""
        half_done = {handle for group in groups for handle in group.half_done}
        for handle in half_done:
            self._stopped.pop(handle, None)
        self.restore([one for one in value if Handle(*one[0]) in half_done])

    # What a sampler is asked.

    def submit(self, requests: Sequence[Request], follow: Follow = "end") -> list[list[Handle]]:
        handles = super().submit(requests, follow)
        for request, group in zip(requests, handles, strict=True):
            self._bare |= dict.fromkeys(group, _bare(request))
            if not self._environments.opens:
                self._drawing.update(group)
        self._settle()
        return handles

    def step(self) -> list[SampleEvent]:
        try:
            self._send()
            events = super().step()
            self._settle()
        except BaseException:
            self.abort(list(self._open))
            raise
        return [*events, *self._take_ended()]

    def num_drawn(self, handle: Handle) -> int:
        if handle in self._drawing:
            return self._engine.num_drawn(handle)
        if handle in self._open:
            return self._open[handle].sequence.response_length
        [ended] = [one.completion for one in self._ended if one.handle == handle]
        return 0 if ended is None else ended.length

    def withdraw(self, handles: Iterable[Handle]) -> dict[Handle, Completion]:
        going = [handle for handle in handles if handle in self._open]
        in_engine = self._engine.withdraw(going)
        self._engine.abort(going)  # K and V of those that wait for their tools
        return {handle: self._half_done(handle, in_engine.get(handle)) for handle in going}

    def _half_done(self, handle: Handle, drawn: Completion | None) -> Completion:
        """Let an episode go, up to the last token that was drawn for it."""
        episode, reason = self._open.pop(handle), self._reasons.pop(handle, None)
        bare = self._bare.pop(handle)
        self._environments.spare.add(self._name(handle))
        self._drawing.discard(handle)
        self._to_ask.pop(handle, None)
        sequence = episode.sequence
        if drawn is not None and drawn.sequence.length > sequence.length:
            return Completion(drawn.sequence, "", "aborted")
        if reason is not None:
            self._stopped[handle] = (sequence.response_length, reason)
        return _cut(sequence, bare)

    def admit(self, requests: Sequence[Request], half_done: Mapping[Handle, Completion]) -> None:
        asked = requests_of(half_done, requests, self._open)
        if not self._open:
            self._periods = Periods(self._engine)
        self._hear_unclaimed()
        for handle, completion in half_done.items():
            request = replace(asked[handle.prompt_id, handle.visit], comes_back=True)
            self._take_up(handle, request, completion)
        self._settle()
        self._periods.note()

    # How an episode comes back.

    def _take_up(self, handle: Handle, request: Request, completion: Completion) -> None:
        """Go through an episode again, up to its last token.  Raises CheckpointError where that is
        not what is known of it.
        """
        self._bare[handle], opens = _bare(request), self._environments.opens
        self._open[handle] = OpenEpisode(request, self._bare[handle], opens)
        self._environments.spare.discard(self._name(handle))
        if handle in self._processes:
            self._processes[handle].follows = False
        stopped, sequence = self._stop_of(handle, completion), completion.sequence
        self._stopped.pop(handle, None)
        if not completion.length:
            if opens:
                self._ask(handle)
            else:
                self._draw(handle)
            return
        edges = np.flatnonzero(np.diff(sequence.loss_mask, prepend=False, append=False))
        turns = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
        self._gone_through = handle
        if opens:
            self._ask(handle)
            self._settle()
        for _, end in turns[:-1]:
            self._check_stands(handle)
            self._end_turn(handle, Completion(sequence.first(end), "", "stop"))
            self._settle()
        self._gone_through = None
        self._check_stands(handle, turns[-1][0])
        if stopped is not None:
            self._end_turn(handle, Completion(sequence, "", stopped[1]))
            return
        self._drawing.add(handle)
        half_done = {handle: Completion(sequence, "", "aborted")}
        self._engine.admit([self._open[handle].request], half_done)

    def _check_stands(self, handle: Handle, length: int | None = None) -> None:
        """Raise CheckpointError where an episode that is gone through has ended or waits, or has
        not so many tokens.
        """
        episode = self._open.get(handle)
        found = None if episode is None or handle in self._to_ask else episode.sequence.length
        if found is None or length not in (None, found):
            raise CheckpointError(
                f"the episode of sample {handle.sample} of prompt {handle.prompt_id!r} does not go "
                "on as it has begun: its environment's settings or the tokenizer are others; "
                "resume with those of before"
            )

    def _settle(self) -> None:
        """Go on with what was answered at once."""
        while self._answered_at_once:
            known, self._answered_at_once = self._answered_at_once, []
            for handle, answer in known:
                if handle in self._open:
                    self._go_on(handle, answer)

    # How an episode goes on.

    def _take_ended(self) -> list[SampleEvent]:
        ended, self._ended = self._ended, []
        return ended

    def _poll(self) -> list[tuple[Handle, TurnAnswer]]:
        known, self._answered_at_once = self._answered_at_once, []
        idle = not (self._engine.num_live or known or self._to_ask)
        found = self._environments.poll(TICK_S if idle and self._open else 0.0)
        known += self._hear(found)
        return [(handle, answer) for handle, answer in known if handle in self._open]

    def _hear_unclaimed(self) -> None:
        """Note the answers that came while others polled."""
        found, self._environments.unclaimed = self._environments.unclaimed, []
        self._hear(found)

    def _hear(self, found: Sequence[tuple[Handle, TurnAnswer]]) -> list[tuple[Handle, TurnAnswer]]:
        """Note answers.  -> As they are noted."""
        heard = list[tuple[Handle, TurnAnswer]]()
        for name, answer in found:
            handle = Handle(name.prompt_id, name.visit, name.sample)
            process = self._processes[handle]
            process.waits = False
            process.seconds += answer.seconds
            answer = self._in_time(answer, process.seconds, process.is_over)
            answer = self._as_asked(answer, process)
            self._know(handle, process.asked, answer.recorded())
            heard.append((handle, answer))
        return heard

    def _as_asked(self, answer: TurnAnswer, process: _Process) -> TurnAnswer:
        """An answer without what a process says again that was told of all turns at once."""
        if self._environments.opens and process.asked[3]:
            answer = replace(answer, opening=None)
        if process.is_over and not self._environments.leads:
            answer = replace(answer, results=(), turn_reward=None)
        return answer

    def _know(
        self, handle: Handle, key: Sequence[Any], content: Mapping[str, Any], is_new: bool = True
    ) -> None:
        self._known.setdefault(handle, {})[json.dumps(key)] = _Answer(key, content, is_new)

    def _ask(self, handle: Handle, wants_reward: bool = False) -> None:
        """Look for the answer, or for the question that is under way; else ask in the next step."""
        episode, key, process = self._open[handle], self._key(handle), self._process_of(handle)
        if process is not None and process.asked == key:
            process.follows, episode.sent = True, len(episode.said)
        known = self._known.get(handle, {}).get(json.dumps(key))
        content = self._answers.find(key) if known is None else known.content
        if content is not None:
            if known is None:
                self._know(handle, key, content)
            self._answered_at_once.append((handle, TurnAnswer.of(content)))
        elif process is None or not process.waits or process.asked != key:
            self._to_ask[handle] = wants_reward

    def _process_of(self, handle: Handle) -> _Process | None:
        """The episode's process; None where it has none, or its room was needed."""
        is_there = self._environments.has(self._name(handle))
        return self._processes.get(handle) if is_there else None

    def _name(self, handle: Handle) -> Handle:
        return OpenHandle(handle.prompt_id, handle.visit, handle.sample)

    def _send(self) -> None:
        """Ask what is to be asked; a process that knows other turns is replaced."""
        to_ask, self._to_ask = self._to_ask, {}
        for handle, wants_reward in to_ask.items():
            process = self._process_of(handle)
            if process is None or not process.follows:
                self._environments.end(self._name(handle))
                process = self._processes[handle] = _Process(follows=True)
                self._open[handle].sent = 0
            process.asked, process.is_over = self._key(handle), self._open[handle].is_over
            process.waits = True
            self._tell(handle, wants_reward)

    def _end_turn(self, handle: Handle, completion: Completion) -> None:
        self._reasons[handle] = completion.finish_reason
        self._drawing.discard(handle)
        super()._end_turn(handle, completion)

    def _draw(self, handle: Handle) -> None:
        if handle != self._gone_through:
            self._drawing.add(handle)
            super()._draw(handle)

    def _close(self, handle: Handle) -> None:
        sequence, turns = self._open[handle].sequence, len(self._open[handle].turns)
        if any(one.key[3] >= turns for one in self._known.get(handle, {}).values()):
            stop = sequence.response_length, self._reasons.get(handle, "stop")
            self._stopped[handle] = stop
        super()._close(handle)
        self._drawing.discard(handle)
        for known in (self._processes, self._to_ask, self._bare, self._reasons):
            known.pop(handle, None)


def _listed(handle: Handle) -> list[Any]:
    return [handle.prompt_id, handle.visit, handle.sample]


def _samples(groups: Sequence[OpenGroup]) -> Iterator[tuple[int, Handle, Completion]]:
    """Those outside of the engine, with the place of each one's group."""
    for place, group in enumerate(groups):
        for sample, completion in sorted(group.samples.items()):
            yield place, group.handle(sample), completion


def _cut(sequence: TokenSequence, bare: TokenSequence) -> Completion:
    """A half-done episode up to the last token that was drawn; the bare prompt where none was."""
    drawn = np.flatnonzero(sequence.loss_mask)
    if not len(drawn):
        return Completion(bare, "", "aborted")
    cut = sequence.first(int(drawn[-1]) + 1)
    return Completion(replace(cut, turn_rewards=None), "", "aborted")


def _bare(request: Request) -> TokenSequence:
    return TokenSequence.of_answer(request.prompt.token_ids, ())
