"""An environment beside an engine: its processes, its tools as the chat template takes them, and
episodes in place of plain generation.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from isobit.config.data import ChatConfig
from isobit.config.environment import EnvironmentConfig
from isobit.config.reward import RewardConfig
from isobit.config.rollout import RolloutConfig
from isobit.data.continuation import Continuation, Speaker
from isobit.data.encoding import most_characters
from isobit.data.tool_calls import tool_format
from isobit.environments.pool import Environments
from isobit.models.folder import SamplingModel
from isobit.parallel.world import ALONE
from isobit.records.text import Completion
from isobit.rollout.engine import RolloutEngine
from isobit.rollout.engine_stats import EngineStats
from isobit.rollout.episodes import Episodes, Tools
from isobit.rollout.requests import Handle
from isobit.util.errors import ConfigError
from isobit.util.terminal import say

Generate = Callable[..., tuple[list[list[Completion]], list[int], EngineStats]]
"""``generate_shared`` with a world and an engine."""
Acting = tuple[Sequence[Mapping[str, Any]], Generate | None]
"""The schemas of an environment's tools, and what generates with them; without one no schemas, and
None.
"""


def grades_by_environment(reward: RewardConfig) -> bool:
    return any(part.function == "environment" for part in reward.named().values())


class _Unrecorded:
    """The ``KnownAnswers`` of completions that nobody repeats."""

    def begin(self, weights_version: int, prompts: Sequence[tuple[str, int]]) -> None: ...

    def find(self, key: Sequence[Any]) -> None: ...

    def end(self, answers: Sequence[Any]) -> None: ...


def read_tools(
    environments: Environments[Handle],
    environment: EnvironmentConfig,
    chat: ChatConfig,
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: Sequence[int],
    grades: bool = False,
) -> Tools:
    """The tools of an environment whose processes are open.

    Raises ConfigError for a chat template that cannot be continued, and for a class without a
    reward where it ``grades``.
    """
    schemas = environments.tools()
    leads = environments.leads
    if grades and not (leads or environments.has_reward or environments.has_turn_reward):
        raise ConfigError(
            f"reward.function is 'environment', but {environment.place} has neither get_reward nor "
            "get_turn_reward; give it one, or name another reward"
        )
    speaks = environments.speaks
    if leads and not (chat.chat and tokenizer.chat_template):
        why = "data.chat is false" if tokenizer.chat_template else "the tokenizer has none"
        raise ConfigError(f"an environment of verifiers needs a chat template, but {why}")
    form = environment.format if schemas else "plain"
    calls_format = tool_format(tokenizer, chat) if form == "auto" else form
    speakers: dict[Speaker, bool] = {"tool": bool(schemas) or not leads, "user": speaks}
    answered_by: list[Speaker] = [who for who, does in speakers.items() if does]
    continuation = Continuation(tokenizer, chat, calls_format, schemas, stop_token_ids, answered_by)
    return Tools(schemas, calls_format, continuation, environments.note)


@contextmanager
def open_environments(
    config: EnvironmentConfig, tokenizer: PreTrainedTokenizerBase
) -> Iterator[Environments[Handle]]:
    """A block with the environment's processes.  Raises ToolError for a class that cannot be
    loaded.
    """
    most = most_characters(config.max_result_tokens, tokenizer)
    environments = Environments[Handle](config, most)
    try:
        environments.tools()
        yield environments
    finally:
        environments.close()


@contextmanager
def episodes_of(
    environment: EnvironmentConfig | None,
    chat: ChatConfig,
    model: SamplingModel,
    rollout: RolloutConfig,
    engine: RolloutEngine,
    grades: bool = False,
) -> Iterator[Acting]:
    """A block with the environment's processes.  Raises as they and ``read_tools`` do."""
    if environment is None:
        yield (), None
        return
    tokenizer, stops = model.tokenizer, model.sampling(rollout).stop_token_ids
    with open_environments(environment, tokenizer) as opened:
        tools = read_tools(opened, environment, chat, tokenizer, stops, grades)
        say(f"isobit: {tools.describe()}")
        episodes = Episodes(
            environment, tools, opened, _Unrecorded(), tokenizer, model.context, engine
        )
        yield tools.schemas, partial(episodes.generate, ALONE, model.policy.version)
