"""The forms of a reward function, recognised by the names of its parameters and called by them.

    Isobit    (prompt, completion) -> float              one completion; the records of
                                                         ``isobit.records.text``
    TRL       (completions, **columns) -> list of float  all completions of a prompt, as
                                                         ``GRPOTrainer`` calls it: also prompts and
                                                         completion_ids by name, and each column of
                                                         the dataset as a list
    verl      (solution_str, ground_truth) -> float      one completion; also data_source and
                                                         extra_info by name

The order of the parameters does not matter. As in TRL, prompts and completions are text where the
dataset's prompt is text, and lists of messages where it is messages. A function may be ``async``,
and may return a dict with ``score`` instead of a number, as in verl. Options give the other
parameters.
"""

import inspect
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from isobit.records.messages import without_beginning
from isobit.records.text import Completion, Prompt
from isobit.rewards.grade import Failure, Outcome, failure_of, outcome_of
from isobit.rewards.graders import SANDBOXED
from isobit.rewards.sandbox import launcher
from isobit.util.errors import RewardError
from isobit.util.option_secrets import hidden, is_secret

if TYPE_CHECKING:
    import asyncio

Mode = Literal["each", "concurrent", "together"]
"""The way in which a prompt's completions are graded: one by one, on one event loop, or in one
call.
"""

Columns: TypeAlias = Sequence[Sequence[str]]
"""What a prompt's row must have: for each parameter the columns of which one is enough. A key of a
table in a column stands behind a dot.
"""

FORMS = (
    "the forms are (prompt, completion) -> float, TRL's (completions, **columns) -> list of floats "
    "and verl's (solution_str, ground_truth) -> float, told apart by these names"
)
_VERL_ANSWERS = ("solution_str", "model_output", "predict_str")
"""Names of the answer in verl's own functions; only the first one identifies the form by itself."""
_VERL_TRUTHS = ("ground_truth", "reward_model.ground_truth", "answer")
"""The places of verl's ground truth in a row, in the order in which they are looked at."""
_IGNORED = {"log_extra", "log_metric"}
"""Logging callables of TRL, which do nothing here."""
_NO_COLUMNS = ("prompt", "completion")
"""Columns of TRL's datasets that its functions are not given by these names."""


class Reward:
    form: str
    given: Collection[str]
    """Parameters that the form gives, if the function has them."""
    mode: Mode = "each"
    takes_columns = False

    def __init__(
        self, function: Callable[..., Any], name: str, options: Mapping[str, Any] | None = None
    ) -> None:
        """Raises RewardError for parameters that nothing gives, and for unknown options."""
        self.name, self._function, self._options = name, function, dict(options or {})
        parameters = _parameters(function, name).values()
        self._named = [parameter.name for parameter in parameters if parameter.kind in _BY_NAME]
        self._any_name = any(
            parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters
        )
        self._required = {
            parameter.name
            for parameter in parameters
            if parameter.default is parameter.empty and parameter.kind in _BY_NAME
        }
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004  (a callable object's)
        )
        if self._is_async and self.mode == "each":
            self.mode = "concurrent"
        self._check_options()
        unknown = self._required - set(self.given) - set(self._options)
        if self.takes_columns:
            unknown &= set(_NO_COLUMNS)
        if unknown:
            raise RewardError(
                f"the reward {name!r} has {self.form} form, but nothing gives its parameters "
                f"{_listed(unknown)}; give them in reward.options, or a default; {FORMS}"
            )

    def describe(self) -> str:
        """The function, its form, its arguments and its sandbox, if it has one, in a line."""
        names = [name for name in self._named if name in self.given or self.takes_columns]
        names += ["**columns"] if self.takes_columns and self._any_name else []
        options = [f"{name}={_shown(name, value)}" for name, value in self._options.items()]
        kind = "async, " if self._is_async else ""
        confined = f"; {self._sandbox()}" if self.name in SANDBOXED else ""
        return f"{self.name} ({kind}{self.form} form: {', '.join([*names, *options])}){confined}"

    def columns(self) -> Columns:
        """The columns that a prompt must have for this reward."""
        return ()

    def _sandbox(self) -> str:
        try:
            return launcher(bool(self._options.get("unsandboxed"))).describe()
        except (
            RewardError
        ):  # grading says why; a run that is only planned may be of another machine
            return "sandbox: none works on this machine"

    def grade(
        self, prompt: Prompt, completions: Sequence[Completion]
    ) -> Iterator[tuple[int, Outcome]]:
        """The index and the outcome of each completion, as they come.

        Whatever the function raises, SystemExit included, is a failure of the completions of that
        call. A RewardError, which means that nothing can be graded, and a KeyboardInterrupt pass
        through.
        """
        calls = [self._call(prompt, [completion]) for completion in completions]
        if self.mode == "concurrent":
            yield from _all_at_once(calls)
            return
        for index, call in enumerate(calls):
            value = _value_of(call)
            yield index, value if isinstance(value, Failure) else outcome_of(value)

    def __call__(self, prompt: Prompt, completion: Completion) -> float:
        """The reward of one completion. Raises RewardError if grading failed."""
        ((_, outcome),) = self.grade(prompt, [completion])
        if isinstance(outcome, Failure):
            raise RewardError(f"the reward {self.name!r} failed: {outcome.message}")
        return outcome

    def _call(self, prompt: Prompt, completions: Sequence[Completion]) -> Callable[[], Any]:
        arguments = self._arguments(prompt, completions)
        return partial(self._function, **arguments | self._options)

    def _arguments(self, prompt: Prompt, completions: Sequence[Completion]) -> dict[str, Any]:
        """The form's arguments for these completions, by the function's names."""
        raise NotImplementedError

    def _check_columns(self, prompt: Prompt) -> None:
        if missing := missing_columns(self.columns(), prompt):
            raise RewardError(
                f"the reward {self.name!r} takes {missing}, which prompt {prompt.id} does not "
                f"have; {columns_of(prompt)}"
            )

    def _takes(self, name: str) -> bool:
        return name in self._named or self._any_name

    def _check_options(self) -> None:
        for name in self._options:
            if name in self.given or name in _IGNORED:
                raise RewardError(
                    f"reward.options gives {name!r}, which the run itself gives; leave it out"
                )
            if not self._takes(name):
                others = set(self._named) - set(self.given)
                raise RewardError(
                    f"reward.options gives {name!r}, which the reward {self.name!r} does not take; "
                    f"it takes {_listed(others)}"
                )


class IsobitReward(Reward):
    form = "Isobit's"
    given = ("prompt", "completion")

    def _arguments(self, prompt: Prompt, completions: Sequence[Completion]) -> dict[str, Any]:
        return {"prompt": prompt, "completion": completions[0]}


class TrlReward(Reward):
    """``(completions, **columns) -> list of float``, once for all completions of a prompt."""

    form = "TRL's"
    given = ("completions", "prompts", "completion_ids", *_IGNORED)
    mode: Mode = "together"
    takes_columns = True

    def columns(self) -> Columns:
        return [[name] for name in sorted(self._required - set(self.given) - set(self._options))]

    def grade(
        self, prompt: Prompt, completions: Sequence[Completion]
    ) -> Iterator[tuple[int, Outcome]]:
        values = _value_of(self._call(prompt, completions))
        if not isinstance(values, Failure):
            values = _listed_rewards(values, len(completions))
        if isinstance(values, Failure):
            values = [values] * len(completions)
        for index, value in enumerate(values):
            yield index, value if isinstance(value, Failure) else outcome_of(value)

    def _arguments(self, prompt: Prompt, completions: Sequence[Completion]) -> dict[str, Any]:
        self._check_columns(prompt)
        content = prompt.text if prompt.content is None else prompt.content
        texts: list[Any] = [completion.whole_text for completion in completions]
        if not isinstance(content, str):
            asked, begun = without_beginning(content)  # TRL gives it as a part of the answer
            content = [dict(message) for message in asked]
            texts = [_messages_of(completion, begun) for completion in completions]
        values: dict[str, Any] = {
            "completions": texts,
            "prompts": [content for _ in completions],
            "completion_ids": [list(completion.token_ids) for completion in completions],
        }
        values |= {
            name: [value] * len(completions)
            for name, value in prompt.row.items()
            if name not in values and name not in _NO_COLUMNS
        }
        values |= {name: _nothing for name in _IGNORED if name in self._named}
        return {name: value for name, value in values.items() if self._takes(name)}


def _messages_of(completion: Completion, begun: str) -> list[dict[str, str]]:
    """An answer as TRL gives it: with the beginning that the prompt has, and all its turns."""
    said = [{"role": "assistant", "content": completion.whole_text}]
    if completion.episode is not None:
        said = completion.episode.messages
    return [{**said[0], "content": begun + said[0]["content"]}, *said[1:]]


class VerlReward(Reward):
    """``compute_score(data_source, solution_str, ground_truth, extra_info)``, or some of these."""

    form = "verl's"
    given = (*_VERL_ANSWERS, "data_source", "ground_truth", "extra_info")

    def columns(self) -> Columns:
        found: list[Sequence[str]] = []
        if "data_source" in self._required:
            found.append(["data_source"])
        if "ground_truth" in self._named:
            found.append(_VERL_TRUTHS)
        return found

    def _arguments(self, prompt: Prompt, completions: Sequence[Completion]) -> dict[str, Any]:
        self._check_columns(prompt)
        text = completions[0].whole_text
        values: dict[str, Any] = {name: text for name in _VERL_ANSWERS if name in self._named}
        if self._takes("ground_truth"):
            values |= self._ground_truth(prompt)
        if self._takes("extra_info"):
            values["extra_info"] = dict(prompt.row.get("extra_info") or {})
        if self._takes("data_source") and "data_source" in prompt.row:
            values["data_source"] = prompt.row["data_source"]
        return values

    def _ground_truth(self, prompt: Prompt) -> dict[str, Any]:
        place = next((place for place in _VERL_TRUTHS if _has(prompt.row, place)), None)
        if place is None:
            return {}
        table, _, name = place.rpartition(".")
        return {"ground_truth": (prompt.row[table] if table else prompt.row)[name]}


def recognise(
    function: Callable[..., Any], name: str, options: Mapping[str, Any] | None = None
) -> Reward:
    """The reward of a function. Raises RewardError for an unknown form, and as ``Reward`` does."""
    parameters = _parameters(function, name)
    names = set(parameters)
    if "completions" in names:
        return TrlReward(function, name, options)
    if "solution_str" in names or ("ground_truth" in names and names & set(_VERL_ANSWERS)):
        return VerlReward(function, name, options)
    if {"prompt", "completion"} <= names:
        return IsobitReward(function, name, options)
    hint = ""
    if "environments" in names:
        hint = (
            "; the objects of episodes are in processes of their own: make it their method "
            'get_reward(self), with reward.function = "environment", or give it to isobit.train '
            "with environment=CLASS"
        )
    raise RewardError(
        f"the reward {name!r} takes ({', '.join(map(str, parameters.values()))}), which is no form "
        f"of a reward; {FORMS}{hint}"
    )


def _shown(name: str, value: Any) -> str:
    """An option's value, unless it is a secret by its name or its origin."""
    if isinstance(value, str) and hidden(value) != value:
        return hidden(value)
    return ".." if is_secret(name) else f"{value!r:.40}"


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _parameters(function: Callable[..., Any], name: str) -> Mapping[str, inspect.Parameter]:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"the reward {name!r} is built in and does not tell its parameters; {FORMS}"
        ) from error
    only = [
        parameter.name
        for parameter in parameters.values()
        if parameter.kind is parameter.POSITIONAL_ONLY
    ]
    if only:
        raise RewardError(
            f"the reward {name!r} takes {_listed(only)} by position alone; leave out the '/' of "
            f"its signature; {FORMS}"
        )
    return parameters


def _value_of(call: Callable[[], Any]) -> Any:
    """The value that a function returned, or a failure for what it raised."""
    try:
        value = call()
        return _loop().run_until_complete(_awaited(value)) if inspect.isawaitable(value) else value
    except (RewardError, KeyboardInterrupt):
        raise
    except BaseException as error:  # libraries stop their threads or tasks by some of them
        return failure_of(error)


def _all_at_once(calls: Sequence[Callable[[], Any]]) -> Iterator[tuple[int, Outcome]]:
    import asyncio  # takes time, in each process that grades

    loop = _loop()
    tasks = {loop.create_task(_outcome_of_async(call)): index for index, call in enumerate(calls)}
    while tasks:
        done, _ = loop.run_until_complete(asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED))
        for task in done:
            yield tasks.pop(task), task.result()


async def _outcome_of_async(call: Callable[[], Awaitable[Any]]) -> Outcome:
    try:
        return outcome_of(await call())
    except (RewardError, KeyboardInterrupt):
        raise
    except BaseException as error:
        return failure_of(error)


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


@cache
def _loop() -> "asyncio.AbstractEventLoop":
    """One event loop for the process, so that a client that a reward keeps open stays usable."""
    import asyncio

    return asyncio.new_event_loop()


def _listed_rewards(values: Any, expected: int) -> list[Any] | Failure:
    """The value of a batch function as a list of ``expected`` items, or a failure."""
    try:
        values = list(values)
    except TypeError:
        return Failure(
            "not a list",
            f"the reward returned {type(values).__name__} {values!r:.80}, expected a list of "
            f"{expected} numbers",
        )
    if len(values) != expected:
        return Failure(
            "wrong length", f"the reward returned {len(values)} values for {expected} completions"
        )
    return values


def _nothing(*_: Any, **__: Any) -> None:
    """The stand-in for a callable of TRL's trainer."""


def missing_columns(columns: Columns, prompt: Prompt) -> str:
    """The ``columns`` that a prompt has not, in words; empty where it has all."""
    missing = [places for places in columns if not any(_has(prompt.row, place) for place in places)]
    return ", ".join(" or ".join(map(repr, places)) for places in missing)


def _has(row: Mapping[str, Any], place: str) -> bool:
    table, _, name = place.rpartition(".")
    values = row.get(table) if table else row
    return isinstance(values, Mapping) and name in values


def columns_of(prompt: Prompt) -> str:
    """A prompt's columns, in words."""
    return f"its columns are {_listed(prompt.row)}"


def _listed(names: Collection[str]) -> str:
    return ", ".join(map(repr, sorted(names))) or "none"
