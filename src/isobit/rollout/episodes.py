"""Completions of several turns: the model calls tools of an environment and goes on with what they
say.

    engine        draws a turn; it ends with a stop token, as any completion does
    here          looks for calls of tools in its text (``isobit.data.tool_calls``)
    environment   runs them in the episode's process (``isobit.environments``), while the engine
                  draws other episodes
    here          appends the results as tokens, outside of the loss mask
    engine        takes the sample on again (``admit``) and draws the next turn

An environment may say something before the first turn, such as the text that ``reset`` returns,
which stands in the prompt.  Each sample then has a prompt of its own; what was added counts in the
length limit as results do.

An episode is one sequence.  What was drawn is never decoded and encoded again: the text of a turn
is only read.  While its tools run, its pages of the KV cache are parked: others may have them, and
K and V that are gone when it goes on are computed again, as after a preemption, with the bits that
they had.  The noise is keyed by the sample and the position, so neither the order of the answers
nor their time changes a token.

An environment of verifiers leads the conversation: it is told of every turn, and answers with what
tools or a user say, or with the end of the episode and its reward.

A turn without calls, or such an environment, ends the episode with ``stop``.  Else it ends with

    length    no room is left for the results, or the length limit ended a turn
    turns     the last of ``environment.max_turns`` still calls tools
    time      a process passed its deadline, or all calls ``environment.episode_s``
    failed    a process died, flooded, or its ``reset`` raised

A class with ``get_turn_reward`` is asked for the reward of a turn once its calls have run.  What an
environment says is recorded, so that a step can be done again without asking it.

``Episodes`` is a ``Sampler``, so several ranks share episodes out as they do samples
(``isobit.rollout.shared``).  Each rank has environments of its own: an episode can move to another
rank during its first turn, and stays where it is once its environment has been asked.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from isobit.config.environment import EnvironmentConfig, ToolFormat
from isobit.data.continuation import Continuation, messages_of
from isobit.data.encoding import most_characters, token_ids
from isobit.data.tool_calls import (
    MalformedCall,
    Parameters,
    Parsed,
    Said,
    parameters_of,
    read_turn,
)
from isobit.environments.env_backends import Call, Turn
from isobit.environments.pool import AnswerLog, Environments, Opening, Result, TurnAnswer
from isobit.parallel.world import World
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Episode, FinishReason, ends_in_thinking
from isobit.rewards.grade import Failure
from isobit.rollout.engine import Follow, RolloutEngine, SampleEvent, Sharing
from isobit.rollout.engine_stats import EngineStats, Periods, Progress
from isobit.rollout.requests import Handle, Request, check_requests, requests_of
from isobit.rollout.sequence import cut, decode
from isobit.rollout.shared import generate_shared
from isobit.util.errors import shown

TICK_S = 0.1
"""Seconds between two polls of a rollout that only waits for tools."""
_CUT = " [cut]"
_TAIL = 20
"""Tokens ahead of a turn that are looked at for the beginning of thinking."""


@dataclass(frozen=True, slots=True)
class Tools:
    """An environment's tools as they are known before anything runs."""

    schemas: Sequence[Mapping[str, Any]]
    form: ToolFormat
    continuation: Continuation
    note: str = ""
    """The environment's line about itself."""

    @property
    def names(self) -> list[str]:
        return [*self.parameters]

    @property
    def parameters(self) -> dict[str, Parameters]:
        """Those of each tool, by its name."""
        return parameters_of(self.schemas)

    def describe(self) -> str:
        """A line for the start of a run."""
        names = ", ".join(map(shown, self.names)) or "none"
        note = f"; {self.note}" if self.note else ""
        return f"tools: {names}; calls in the format {self.form} (environment.format){note}"


@dataclass(slots=True, eq=False)
class OpenEpisode:
    """An episode that has not ended."""

    request: Request
    sequence: TokenSequence
    is_opening: bool
    """Whether the environment has yet to say what it has for the prompt."""
    prompt: str = ""
    """The prompt's text as the environment has changed it."""
    finish_reason: FinishReason = "stop"
    """The last turn's; the episode's once the environment is asked for its reward."""
    text: str = ""
    stop_string: str = ""
    turns: list[str] = field(default_factory=list)
    parsed: list[Parsed] = field(default_factory=list)
    """The calls of the last turn."""
    said: list[Turn] = field(default_factory=list)
    """All turns, with the calls that can be run."""
    sent: int = 0
    """The number of turns that the episode's process has been given."""
    results: list[tuple[tuple[str, str], ...]] = field(default_factory=list)
    turn_rewards: list[float | None] = field(default_factory=list)
    """Rewards of the turns that called tools; None where the environment failed."""
    failure: Failure | None = None
    reward: float | None = None
    seconds: float = 0.0
    is_over: bool = False
    """Whether only the environment's reward is waited for."""


class Episodes:
    """A ``isobit.rollout.engine.Sampler`` whose samples are episodes.

    Args:
        engine: draws the turns, and has nothing else to do.
        context: positions of the model.
        answers: the record of what environments have said.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        tools: Tools,
        environments: Environments[Handle],
        answers: AnswerLog,
        tokenizer: PreTrainedTokenizerBase,
        context: int,
        engine: RolloutEngine,
    ) -> None:
        self._config, self._tools, self._environments = config, tools, environments
        self._parameters = tools.parameters
        self._answers, self._tokenizer, self._context = answers, tokenizer, context
        self._engine = engine
        self._open: dict[Handle, OpenEpisode] = {}
        self._answered_at_once: list[tuple[Handle, TurnAnswer]] = []
        self._ended: list[SampleEvent] = []
        self._said: list[tuple[Sequence[Any], Mapping[str, Any]]] = []
        """Answers of environments in this rollout, with their keys."""
        self._periods = Periods(engine)

    def generate(
        self,
        world: World,
        weights_version: int,
        requests: Sequence[Request],
        progress: Callable[[Progress], None] | None = None,
        complete: Callable[[int, list[Completion]], None] | None = None,
    ) -> tuple[list[list[Completion]], list[int], EngineStats]:
        """Generate as ``generate_shared`` does, with the environments' recorded answers where there
        are any. Raises ToolError where no process of an environment can be had.
        """
        self._said.clear()
        self._answers.begin(
            weights_version, [(request.prompt.id, request.visit) for request in requests]
        )
        found = generate_shared(world, self, requests, progress, complete)
        said = world.all_gather(json.dumps(self._said))
        self._answers.end([one for part in said for one in json.loads(part)])
        return found

    # What a sampler is asked.

    @property
    def sharing(self) -> Sharing | None:
        return self._engine.sharing

    @property
    def stats(self) -> EngineStats:
        return self._periods.total

    @property
    def num_live(self) -> int:
        return len(self._open)

    @property
    def num_running(self) -> int:
        return self._engine.num_running

    @property
    def has_room(self) -> bool:
        """Episodes that wait for their tools take none."""
        return self._engine.has_room

    def check(self, requests: Sequence[Request]) -> None:
        check_requests(requests, self._open)
        self._engine.check(requests)

    def submit(self, requests: Sequence[Request], follow: Follow = "end") -> list[list[Handle]]:
        """Take on episodes, which are followed to their end alone."""
        assert follow == "end", "a turn is not told of before it is read"
        self.check(requests)
        requests = [replace(one, comes_back=True) for one in requests]
        if not self._open:
            self._periods = Periods(self._engine)
        opens = self._environments.opens
        handles = _handles(requests) if opens else self._engine.submit(requests)
        for request, group in zip(requests, handles, strict=True):
            prompt = TokenSequence.of_answer(request.prompt.token_ids, ())
            self._open.update((handle, OpenEpisode(request, prompt, opens)) for handle in group)
            for handle in group if opens else ():
                self._ask(handle)
        self._periods.note()
        return handles

    def step(self) -> list[SampleEvent]:
        """Draw tokens, and go on with the episodes whose environments have answered."""
        try:
            for event in self._engine.step():
                if event.completion is not None:
                    self._end_turn(event.handle, event.completion)
            for handle, answer in self._poll():
                self._go_on(handle, answer)
        except BaseException:
            self.abort(list(self._open))
            raise
        self._periods.note()
        return self._take_ended()

    def abort(self, handles: Iterable[Handle]) -> list[SampleEvent]:
        asked = [handle for handle in handles if handle in self._open]
        for event in self._engine.abort(asked):
            if event.completion is not None:
                self._open[event.handle].sequence = event.completion.sequence
        for handle in asked:
            self._open[handle].finish_reason = "aborted"
            self._close(handle)
        return self._take_ended()

    def num_drawn(self, handle: Handle) -> int:
        """Tokens of an episode behind its prompt, but for those of a later turn that is being
        drawn.
        """
        episode = self._open[handle]
        if self._may_move(episode):
            return self._engine.num_drawn(handle)
        return episode.sequence.length - len(episode.request.prompt.token_ids)

    def withdraw(self, handles: Iterable[Handle]) -> dict[Handle, Completion]:
        """Let those of the episodes go that are in their first turn."""
        movable = [one for one in handles if one in self._open and self._may_move(self._open[one])]
        half_done = self._engine.withdraw(movable)
        for handle in half_done:
            del self._open[handle]
        return half_done

    def admit(self, requests: Sequence[Request], half_done: Mapping[Handle, Completion]) -> None:
        requests = [replace(one, comes_back=True) for one in requests]
        asked = requests_of(half_done, requests, self._open)
        if not self._open:
            self._periods = Periods(self._engine)
        self._engine.admit(requests, half_done)
        for handle in half_done:
            request = asked[handle.prompt_id, handle.visit]
            prompt = TokenSequence.of_answer(request.prompt.token_ids, ())
            self._open[handle] = OpenEpisode(request, prompt, False)
        self._periods.note()

    def take_weights(self) -> None:
        self._engine.take_weights()

    # How an episode goes on.

    def _may_move(self, episode: OpenEpisode) -> bool:
        return not self._environments.opens and not episode.turns

    def _take_ended(self) -> list[SampleEvent]:
        if not self._open:
            self._answered_at_once.clear()
        ended, self._ended = self._ended, []
        return ended

    def _poll(self) -> list[tuple[Handle, TurnAnswer]]:
        """New answers of environments, after a short wait where the engine has no work."""
        known, self._answered_at_once = self._answered_at_once, []
        idle = not self._engine.num_live and not known
        for handle, answer in self._environments.poll(TICK_S if idle and self._open else 0.0):
            if handle in self._open:  # not so an ``OpenHandle``
                known.append((handle, self._noted(handle, answer)))
            else:
                self._environments.unclaimed.append((handle, answer))
        return known

    def _noted(self, handle: Handle, answer: TurnAnswer) -> TurnAnswer:
        """An answer of a process, as it is recorded: a failure where the episode's time is over."""
        episode = self._open[handle]
        episode.seconds += answer.seconds
        answer = self._in_time(answer, episode.seconds, episode.is_over)
        self._said.append((self._key(handle), answer.recorded()))
        return answer

    def _in_time(self, answer: TurnAnswer, seconds: float, is_over: bool) -> TurnAnswer:
        """An answer after so many seconds of an episode's calls."""
        most = self._config.episode_s
        if answer.failure is not None or is_over or seconds <= most:
            return answer
        message = f"all calls took longer than environment.episode_s = {most:g}"
        return TurnAnswer(failure=Failure("deadline", message))

    def _name(self, handle: Handle) -> Handle:
        """The name of an episode for the environments."""
        return handle

    def _key(self, handle: Handle) -> list[Any]:
        """The name of what is asked now, with a digest of all that led to it."""
        episode = self._open[handle]
        digest = hashlib.sha256(episode.sequence.token_ids.tobytes()).hexdigest()[:16]
        turn = len(episode.turns) + episode.is_over
        return [handle.prompt_id, handle.visit, handle.sample, turn, digest]

    def _end_turn(self, handle: Handle, completion: Completion) -> None:
        """The engine has drawn a turn: run its calls, or end the episode."""
        episode, sampling = self._open[handle], self._open[handle].request.sampling
        before = len(episode.sequence.token_ids)
        episode.sequence = completion.sequence
        ids = completion.sequence.token_ids[before:].tolist()
        spoken = ids[:-1] if ids and ids[-1] in sampling.stop_token_ids else ids
        stops, shown = sampling.stop_strings, sampling.special_tokens
        turn = "".join(cut(decode(self._tokenizer, spoken, special=True), stops))
        episode.text, episode.stop_string = cut(decode(self._tokenizer, spoken, shown), stops)
        episode.turns.append(turn)
        ahead = completion.sequence.token_ids[max(0, before - _TAIL) : before].tolist()
        is_thinking = ends_in_thinking(decode(self._tokenizer, ahead, special=True))
        if self._environments.leads and completion.finish_reason in ("stop", "length"):
            is_cut = completion.finish_reason == "length"
            reads = bool(self._tools.schemas)
            said = self._read(turn, is_thinking, is_cut) if reads else Said(turn, [])
            self._follow(handle, said, is_cut)
            return
        if completion.finish_reason != "stop":
            self._finish(handle, completion.finish_reason)
            return
        episode.parsed = self._read(turn, is_thinking).calls
        if not episode.parsed:
            self._finish(handle, "stop")
        elif len(episode.turns) >= self._config.max_turns:
            self._finish(handle, "turns")
        else:
            calls = _runnable(episode.parsed)
            episode.said.append(Turn(calls))
            if calls or self._environments.has_turn_reward:
                self._ask(handle)
            else:
                self._answered_at_once.append((handle, TurnAnswer()))

    def _read(self, turn: str, is_thinking: bool, is_cut: bool = False) -> Said:
        return read_turn(turn, self._tools.form, self._parameters, is_thinking, not is_cut)

    def _follow(self, handle: Handle, said: Said, is_cut: bool) -> None:
        """Tell an environment that leads of a turn, whose calls all can be read or are text."""
        episode, calls = self._open[handle], _runnable(said.calls)
        calls = calls if len(calls) == len(said.calls) else []
        episode.parsed = said.calls if calls else []
        text = said.text if calls else episode.text
        episode.said.append(Turn(calls, text, is_cut))
        episode.is_over = is_cut or len(episode.turns) >= self._config.max_turns
        episode.finish_reason = "length" if is_cut else "turns" if episode.is_over else "stop"
        self._ask(handle, wants_reward=episode.is_over)

    def _ask(self, handle: Handle, wants_reward: bool = False) -> None:
        """Ask the record, or the environment, which is also told of turns that the record
        answered.
        """
        recorded = self._answers.find(self._key(handle))
        if recorded is not None:
            self._said.append((self._key(handle), recorded))
            self._answered_at_once.append((handle, TurnAnswer.of(recorded)))
            return
        self._tell(handle, wants_reward)

    def _tell(self, handle: Handle, wants_reward: bool) -> None:
        """Tell the environment of all turns that it has not been told of, and ask it."""
        episode = self._open[handle]
        turns, episode.sent = episode.said[episode.sent :], len(episode.said)
        prompt = episode.request.prompt
        columns = prompt.row
        if self._environments.leads:
            columns = {**columns, "prompt": [*map(dict, messages_of(prompt))]}
        self._environments.ask(self._name(handle), columns, turns, wants_reward)

    def _go_on(self, handle: Handle, answer: TurnAnswer) -> None:
        """Give the model the results, or end the episode."""
        episode = self._open[handle]
        if episode.is_over or answer.is_over:
            if answer.is_over and episode.finish_reason == "turns":
                episode.finish_reason = "stop"
            episode.reward = answer.reward
            episode.failure = episode.failure or answer.failure
            self._close(handle)
            return
        if not episode.is_opening:
            episode.turn_rewards.append(answer.turn_reward)
        if answer.failure is not None:
            episode.failure = answer.failure
            self._finish(handle, "time" if answer.failure.kind == "deadline" else "failed")
            return
        if episode.is_opening:
            self._begin(handle, answer.opening)
            return
        results = (
            [*map(self._fitted, answer.results)]
            if self._environments.leads
            else self._visible_results(episode.parsed, answer.results)
        )
        if results is None:
            episode.failure = Failure("flood", "it answered other calls than the model made")
            episode.turn_rewards[-1] = None
            self._finish(handle, "failed")
            return
        episode.results.append(tuple((result.kind, result.text) for result in results))
        texts = [result.text for result in results if result.kind != "user"]
        spoken = [result.text for result in results if result.kind == "user"]
        last = int(episode.sequence.token_ids[-1])
        names = [one.name for one in episode.parsed]
        given = self._tools.continuation.token_ids(texts, last, spoken, names)
        sequence = episode.sequence.with_given(given)
        if sequence.length >= episode.request.max_length(self._context):
            self._finish(handle, "length")
            return
        episode.sequence = sequence
        self._draw(handle)

    def _begin(self, handle: Handle, opening: Opening) -> None:
        """Draw the first turn, behind the prompt with what the environment has said for it."""
        episode = self._open[handle]
        episode.is_opening = False
        request = episode.request
        if opening:
            if isinstance(opening, str):
                opening = self._fitted(Result("ok", opening)).text
            prompt = self._tools.continuation.opened(request.prompt, opening)
            episode.prompt = prompt.text
            left = request.max_length(self._context) - len(prompt.token_ids)
            if left <= 0:
                self._finish(handle, "length")
                return
            sampling = replace(request.sampling, max_new_tokens=left)
            episode.request = replace(request, prompt=prompt, sampling=sampling)
            episode.sequence = TokenSequence.of_answer(prompt.token_ids, ())
        self._draw(handle)

    def _draw(self, handle: Handle) -> None:
        """The next turn, behind what the sequence has."""
        episode = self._open[handle]
        begun = Completion(episode.sequence, "", "aborted")
        self._engine.admit([episode.request], {handle: begun})
        self._periods.note()  # it may have had nothing to do

    def _visible_results(
        self, parsed: Sequence[Parsed], answered: Sequence[Result]
    ) -> list[Result] | None:
        """The result of each call that the model sees; None where the environment answered other
        calls.
        """
        if sum(not isinstance(call, MalformedCall) for call in parsed) != len(answered):
            return None
        rest, visible = iter(answered), list[Result]()
        for call in parsed:
            malformed = isinstance(call, MalformedCall)
            result = Result("malformed", call.problem) if malformed else next(rest)
            text = result.text if result.kind in ("ok", "cut") else f"error: {result.text}"
            visible.append(self._fitted(Result(result.kind, text)))
        return visible

    def _fitted(self, result: Result) -> Result:
        """A result of at most ``environment.max_result_tokens``, or a few more where the cut text
        is read as other tokens.
        """
        most = self._config.max_result_tokens
        text = result.text[: most_characters(most, self._tokenizer)]
        (ids,) = token_ids([text], self._tokenizer)
        if len(ids) <= most and len(text) == len(result.text):
            return result if result.kind != "cut" else Result("cut", text + _CUT)
        kind = "cut" if result.kind == "ok" else result.kind
        return Result(kind, decode(self._tokenizer, ids[:most], special=True) + _CUT)

    def _finish(self, handle: Handle, reason: FinishReason) -> None:
        """The episode has ended; its environment may still give a reward."""
        episode = self._open[handle]
        episode.finish_reason = reason
        gives = self._environments.has_reward and reason not in ("time", "failed", "aborted")
        if not gives:
            self._close(handle)
            return
        episode.is_over = True
        self._ask(handle, wants_reward=True)

    def _close(self, handle: Handle) -> None:
        episode = self._open.pop(handle)
        failure = episode.failure or Failure("", "")
        self._engine.abort([handle])
        self._environments.end(self._name(handle))
        record = Episode(
            tuple(episode.turns),
            tuple(episode.results),
            failure.kind,
            failure.message,
            episode.reward,
            episode.prompt,
        )
        sequence = episode.sequence
        if self._environments.has_turn_reward:
            sequence = sequence.with_turn_rewards(episode.turn_rewards)
        ended = episode.text, episode.finish_reason, record, episode.stop_string
        made = Completion(sequence, *ended)
        self._ended.append(SampleEvent(handle, completion=made))


def _handles(requests: Sequence[Request]) -> list[list[Handle]]:
    """The handles that ``engine.submit`` would give, for samples that begin later."""
    return [
        [Handle(request.prompt.id, request.visit, sample) for sample in range(request.samples)]
        for request in requests
    ]


def _runnable(parsed: Sequence[Parsed]) -> list[Call]:
    calls = [one for one in parsed if not isinstance(one, MalformedCall)]
    return [Call(call.name, call.positional, call.arguments) for call in calls]
