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
is only read.  While its tools run, an episode holds no pages of the KV cache; its K and V are
computed again when it goes on, as after a preemption, with the bits that they had.  The noise is
keyed by the sample and the position, so neither the order of the answers nor their time changes a
token.

An environment of verifiers leads the conversation: it is told of every turn, and answers with what
tools or a user say, or with the end of the episode and its reward.

A turn without calls, or such an environment, ends the episode with ``stop``.  Else it ends with

    length    no room is left for the results, or the length limit ended a turn
    turns     the last of ``environment.max_turns`` still calls tools
    time      a process passed its deadline, or all calls ``environment.episode_s``
    failed    a process died, flooded, or its ``reset`` raised

A class with ``get_turn_reward`` is asked for the reward of a turn once its calls have run.  What an
environment says is recorded, so that a step can be done again without asking it.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from isobit.config.data import ChatConfig, EnvironmentConfig, ToolFormat
from isobit.data.tokenizer import most_characters, token_ids
from isobit.data.tool_calls import (
    MARKS,
    Continuation,
    MalformedCall,
    Parsed,
    Speaker,
    calls_begin,
    messages_of,
    parse_tool_calls,
    tool_format,
)
from isobit.environments.hosted import Call, Turn
from isobit.environments.pool import Answer, Environments, KnownAnswers, Opening, Result
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Episode, FinishReason
from isobit.rewards.outcome import Failure
from isobit.rollout.engine import (
    EngineStats,
    Handle,
    Progress,
    Request,
    RolloutEngine,
    check_is_free,
)
from isobit.rollout.sequence import cut, decode
from isobit.util.errors import ConfigError

_TICK_S = 0.1
"""Of a rollout that only waits for tools."""
_CUT = " [cut]"


@dataclass(frozen=True, slots=True)
class Tools:
    """What is known of an environment's tools before anything runs."""

    schemas: Sequence[Mapping[str, Any]]
    form: ToolFormat
    continuation: Continuation

    def describe(self) -> str:
        """A line for the start of a run."""
        names = ", ".join(schema["function"]["name"] for schema in self.schemas) or "none"
        return f"tools: {names}; calls in the format {self.form} (environment.format)"


def read_tools(
    environment: EnvironmentConfig,
    chat: ChatConfig,
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: Sequence[int],
) -> Tools:
    """The tools of an environment, which is loaded by a process for it.

    Raises ToolError for a class that cannot be loaded, and ConfigError for a chat template that
    cannot be continued.
    """
    with open_environments(environment, tokenizer) as environments:
        schemas, leads, speaks = environments.tools(), environments.leads, environments.speaks
    if leads and not (chat.chat and tokenizer.chat_template):
        why = "data.chat is false" if tokenizer.chat_template else "the tokenizer has none"
        raise ConfigError(f"an environment of verifiers needs a chat template, but {why}")
    form = environment.format if schemas else "plain"
    known = tool_format(tokenizer, chat) if form == "auto" else form
    speakers: dict[Speaker, bool] = {"tool": bool(schemas) or not leads, "user": speaks}
    answered_by: list[Speaker] = [who for who, does in speakers.items() if does]
    made = Continuation(tokenizer, chat, known, schemas, stop_token_ids, answered_by)
    return Tools(schemas, known, made)


@contextmanager
def open_environments(
    config: EnvironmentConfig, tokenizer: PreTrainedTokenizerBase
) -> Iterator[Environments[Handle]]:
    """A block with the environment's processes."""
    most = most_characters(config.max_result_tokens, tokenizer)
    environments = Environments[Handle](config, most)
    try:
        environments.tools()
        yield environments
    finally:
        environments.close()


@dataclass(slots=True, eq=False)
class _Open:
    """An episode that has not ended."""

    request: Request
    sequence: TokenSequence
    is_opening: bool
    """Whether the environment has yet to say what it has for the prompt."""
    prompt: str = ""
    """As the environment has changed it."""
    finish_reason: FinishReason = "stop"
    """Of the last turn; once the environment is asked for its reward, of the episode."""
    text: str = ""
    turns: list[str] = field(default_factory=list)
    parsed: list[Parsed] = field(default_factory=list)
    """Of the last turn."""
    said: list[Turn] = field(default_factory=list)
    """All turns, with the calls that can be run."""
    sent: int = 0
    """Those that the episode's process has been given."""
    results: list[tuple[tuple[str, str], ...]] = field(default_factory=list)
    turn_rewards: list[float | None] = field(default_factory=list)
    """Of the turns that called tools; None where the environment failed."""
    failure: str = ""
    reward: float | None = None
    seconds: float = 0.0
    is_over: bool = False
    """Whether only the environment's reward is waited for."""


class Episodes:
    """Generates with an environment.

    Args:
        context: positions of the model.
        answers: the record of what environments have said.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        tools: Tools,
        environments: Environments[Handle],
        answers: KnownAnswers,
        tokenizer: PreTrainedTokenizerBase,
        context: int,
    ) -> None:
        self._config, self._tools, self._environments = config, tools, environments
        self._answers, self._tokenizer, self._context = answers, tokenizer, context
        self._open: dict[Handle, _Open] = {}
        self._answered_at_once: list[tuple[Handle, Answer]] = []
        self._ended: dict[Handle, Completion] = {}

    def generate(
        self,
        engine: RolloutEngine,
        weights_version: int,
        requests: Sequence[Request],
        progress: Callable[[Progress], None] | None = None,
        complete: Callable[[int, list[Completion]], None] | None = None,
    ) -> tuple[list[list[Completion]], EngineStats]:
        """The completions of each request, as ``isobit.rollout.engine.generate`` gives them, and
        what the engine did.

        Raises:
            ToolError: where no process of an environment can be had; and what ``generate`` raises.
        """
        check_is_free(engine)
        engine.take_weights()
        self._answers.begin(weights_version, [(one.prompt.id, one.visit) for one in requests])
        began, periods = perf_counter(), _Periods(engine)
        opens = self._environments.opens
        handles = _handles(engine, requests) if opens else engine.submit(requests)
        periods.note()
        for request, group in zip(requests, handles, strict=True):
            prompt = TokenSequence.of_answer(request.prompt.token_ids, ())
            self._open.update((handle, _Open(request, prompt, opens)) for handle in group)
        waiting = dict(enumerate(handles))
        total = len(self._open)
        try:
            for handle in self._open if opens else ():
                self._ask(handle)
            while self._open:
                for event in engine.step():
                    if event.completion is not None:
                        self._end_turn(event.handle, event.completion)
                for handle, answer in self._poll(engine):
                    self._go_on(engine, handle, answer)
                periods.note()
                self._tell_of_groups(waiting, complete)
                if progress is not None:
                    progress(
                        Progress(
                            len(self._ended),
                            engine.num_running,
                            total,
                            periods.total().generated_tokens,
                            perf_counter() - began,
                        )
                    )
            made = [[self._ended[handle] for handle in group] for group in handles]
            self._answers.end()
        except BaseException:
            engine.abort(handle for group in handles for handle in group)
            raise
        finally:
            self._environments.end_all()
            self._open.clear()
            self._ended.clear()
            self._answered_at_once.clear()
        stats = periods.total()
        stats.seconds = perf_counter() - began
        return made, stats

    def _tell_of_groups(
        self,
        waiting: dict[int, list[Handle]],
        complete: Callable[[int, list[Completion]], None] | None,
    ) -> None:
        """Hand on the groups that have all their episodes, which wait no longer."""
        for place, group in list(waiting.items()):
            if all(handle in self._ended for handle in group):
                del waiting[place]
                if complete is not None:
                    complete(place, [self._ended[handle] for handle in group])

    def _poll(self, engine: RolloutEngine) -> list[tuple[Handle, Answer]]:
        """What environments have answered; waited for a little where the engine has no work."""
        known, self._answered_at_once = self._answered_at_once, []
        idle = not engine.num_live and not known
        found = self._environments.poll(_TICK_S if idle and self._open else 0.0)
        return known + [(handle, self._noted(handle, answer)) for handle, answer in found]

    def _noted(self, handle: Handle, answer: Answer) -> Answer:
        """An answer of a process, as it is recorded: a failure where the episode's time is over."""
        episode, most = self._open[handle], self._config.episode_s
        episode.seconds += answer.seconds
        if answer.failure is None and not episode.is_over and episode.seconds > most:
            message = f"all calls took longer than environment.episode_s = {most:g}"
            answer = Answer(failure=Failure("deadline", message))
        self._answers.keep(self._key(handle), answer.recorded())
        return answer

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
        turn = cut(decode(self._tokenizer, spoken, special=True), stops)
        episode.text = cut(decode(self._tokenizer, spoken, shown), stops)
        episode.turns.append(turn)
        if self._environments.leads and completion.finish_reason in ("stop", "length"):
            self._follow(handle, turn, completion.finish_reason == "length")
            return
        if completion.finish_reason != "stop":
            self._finish(handle, completion.finish_reason)
            return
        episode.parsed = parse_tool_calls(turn, self._tools.form)
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
                self._answered_at_once.append((handle, Answer()))

    def _follow(self, handle: Handle, turn: str, is_cut: bool) -> None:
        """Tell an environment that leads of a turn, whose calls all can be read or are text."""
        episode, form = self._open[handle], self._tools.form
        parsed = parse_tool_calls(turn, form) if self._tools.schemas else []
        calls = _runnable(parsed)
        calls = calls if len(calls) == len(parsed) else []
        cut_at = calls_begin(turn, form, is_start=True) if calls and form in MARKS else None
        text = episode.text if cut_at is None else turn[:cut_at]
        episode.said.append(Turn(calls, text, is_cut))
        episode.is_over = is_cut or len(episode.turns) >= self._config.max_turns
        episode.finish_reason = "length" if is_cut else "turns" if episode.is_over else "stop"
        self._ask(handle, wants_reward=episode.is_over)

    def _ask(self, handle: Handle, wants_reward: bool = False) -> None:
        """Ask the record, or the environment, which is also told of turns that the record
        answered.
        """
        episode = self._open[handle]
        recorded = self._answers.find(self._key(handle))
        if recorded is not None:
            self._answers.keep(self._key(handle), recorded)
            self._answered_at_once.append((handle, Answer.of(recorded)))
            return
        turns, episode.sent = episode.said[episode.sent :], len(episode.said)
        prompt = episode.request.prompt
        columns = prompt.row
        if self._environments.leads:
            columns = {**columns, "prompt": [*map(dict, messages_of(prompt))]}
        self._environments.ask(handle, columns, turns, wants_reward)

    def _go_on(self, engine: RolloutEngine, handle: Handle, answer: Answer) -> None:
        """Give the model the results, or end the episode."""
        episode = self._open[handle]
        if episode.is_over or answer.is_over:
            if answer.is_over and episode.finish_reason == "turns":
                episode.finish_reason = "stop"
            episode.reward = answer.reward
            episode.failure = episode.failure or (answer.failure.kind if answer.failure else "")
            self._close(handle)
            return
        if not episode.is_opening:
            episode.turn_rewards.append(answer.turn_reward)
        if answer.failure is not None:
            episode.failure = answer.failure.kind
            self._finish(handle, "time" if answer.failure.kind == "deadline" else "failed")
            return
        if episode.is_opening:
            self._begin(engine, handle, answer.opening)
            return
        results = (
            [*map(self._fitted, answer.results)]
            if self._environments.leads
            else self._told(episode.parsed, answer.results)
        )
        if results is None:
            episode.failure, episode.turn_rewards[-1] = "flood", None
            self._finish(handle, "failed")
            return
        episode.results.append(tuple((one.kind, one.text) for one in results))
        texts = [one.text for one in results if one.kind != "user"]
        spoken = [one.text for one in results if one.kind == "user"]
        last = int(episode.sequence.token_ids[-1])
        given = self._tools.continuation.token_ids(texts, last, spoken)
        sequence = episode.sequence.with_given(given)
        if sequence.length >= episode.request.max_length(self._context):
            self._finish(handle, "length")
            return
        episode.sequence = sequence
        self._draw(engine, handle)

    def _begin(self, engine: RolloutEngine, handle: Handle, opening: Opening) -> None:
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
        self._draw(engine, handle)

    def _draw(self, engine: RolloutEngine, handle: Handle) -> None:
        """The next turn, behind what the sequence has."""
        episode = self._open[handle]
        begun = Completion(episode.sequence, "", "aborted")
        engine.admit([episode.request], {handle: begun})

    def _told(self, parsed: Sequence[Parsed], answered: Sequence[Result]) -> list[Result] | None:
        """What the model is told of each call; None where the environment answered others."""
        if sum(not isinstance(one, MalformedCall) for one in parsed) != len(answered):
            return None
        rest, found = iter(answered), list[Result]()
        for one in parsed:
            malformed = isinstance(one, MalformedCall)
            result = Result("malformed", one.problem) if malformed else next(rest)
            text = result.text if result.kind in ("ok", "cut") else f"error: {result.text}"
            found.append(self._fitted(Result(result.kind, text)))
        return found

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
        self._environments.end(handle)
        record = Episode(
            tuple(episode.turns),
            tuple(episode.results),
            episode.failure,
            episode.reward,
            episode.seconds,
            episode.prompt,
        )
        sequence = episode.sequence
        if self._environments.has_turn_reward:
            sequence = _with_turn_rewards(sequence, episode.turn_rewards)
        self._ended[handle] = Completion(sequence, episode.text, episode.finish_reason, record)


def _with_turn_rewards(sequence: TokenSequence, rewards: Sequence[float | None]) -> TokenSequence:
    """The sequence with rewards of its first turns; the others have 0."""
    found = np.zeros(sequence.response_length)
    found[sequence.turn_ends[: len(rewards)]] = [
        math.nan if one is None else one for one in rewards
    ]
    return sequence.with_columns(turn_rewards=found)


def _handles(engine: RolloutEngine, requests: Sequence[Request]) -> list[list[Handle]]:
    """As ``engine.submit`` gives and refuses them, of samples that begin later."""
    engine.check(requests)
    return [
        [Handle(one.prompt.id, one.visit, sample) for sample in range(one.samples)]
        for one in requests
    ]


def _runnable(parsed: Sequence[Parsed]) -> list[Call]:
    calls = [one for one in parsed if not isinstance(one, MalformedCall)]
    return [Call(one.name, one.positional, one.arguments) for one in calls]


class _Periods:
    """The counts of an engine, which begins a new record when it has had nothing to do."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._records: list[EngineStats] = []

    def note(self) -> None:
        if not any(one is self._engine.stats for one in self._records[-1:]):
            self._records.append(self._engine.stats)

    def total(self) -> EngineStats:
        return sum(self._records, EngineStats())
