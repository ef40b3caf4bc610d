"""The table ``environment``: the tools that a model may call during an episode."""

import re
from typing import Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from isobit.config.base import MAX_COUNT, MAX_WAIT_S, HomeName, Strict

ToolFormat = Literal["hermes", "qwen3_coder", "llama3", "mistral", "harmony", "plain"]
"""How a model writes calls of tools (``isobit.data.tool_calls``)."""
ENVIRONMENTS = ("calculator", "guess", "python", "search")
"""Those that ship with Isobit (``isobit.environments.shipped``)."""
_SERVER = re.compile(r"(ws|http)s?://[^/\s]+")


class EnvironmentConfig(Strict):
    """The tools of an episode: a completion of several turns, with results of tools between."""

    factory: HomeName | None = Field(default=None, alias="class")
    """``path/to/file.py:Class`` or ``module:Class``, whose public methods are the tools, as in
    TRL's ``environment_factory``; or one that ships with Isobit: ``calculator``, ``guess``,
    ``python``, ``search``.
    """
    verifiers: HomeName | None = None
    """An environment of the package ``verifiers`` in place of ``class``: the name of an installed
    one, or a file with ``load_environment``.
    """
    openenv: str | None = None
    """The address of an OpenEnv server, such as ``ws://127.0.0.1:8000``, in place of ``class``."""
    options: dict[str, Any] = Field(default={})
    """Keyword arguments of the class, of ``load_environment``, or of each reset of a server;
    "env:NAME" is an environment variable's value and is not written anywhere.
    """
    format: Literal["auto", ToolFormat] = "auto"
    """How the model writes calls; auto asks the chat template, and takes plain without one."""
    max_turns: int = Field(default=8, gt=1, le=1000)
    """Turns of the model in an episode. The last one has to answer: it calls no tools. An episode
    with its results has at most ``rollout.max_new_tokens`` tokens behind the prompt.
    """
    max_result_tokens: int = Field(default=256, gt=0, le=MAX_COUNT)
    """Tokens of one result; the rest is cut off."""
    deadline_s: float = Field(default=10.0, gt=0, le=MAX_WAIT_S)
    """Seconds for the calls of one turn, after which the episode's process is killed. Turns that
    are run again, after an interruption, have as many each.
    """
    episode_s: float = Field(default=60.0, gt=0, le=MAX_WAIT_S)
    """Seconds for all calls of an episode."""
    memory_mib: int = Field(default=1024, ge=64, le=MAX_COUNT)
    """Memory of an episode's process beyond that of the imports, and of each that it starts."""
    at_once: int = Field(default=32, gt=0, le=4096)
    """Episodes whose calls run at once; of an OpenEnv server, its sessions."""

    @property
    def kind(self) -> Literal["class", "verifiers", "openenv"]:
        """The key that names it."""
        if self.openenv is not None:
            return "openenv"
        return "class" if self.verifiers is None else "verifiers"

    @property
    def place(self) -> str:
        """The class, environment or address that the key names."""
        return self.factory or self.verifiers or self.openenv or ""

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        sources = (self.factory, self.verifiers, self.openenv)
        count = sum(source is not None for source in sources)
        reason = "needs one of class, verifiers and openenv, and no two" if count != 1 else ""
        if self.openenv is not None and not _SERVER.match(self.openenv):
            reason = f'openenv is an address such as "ws://127.0.0.1:8000", not {self.openenv!r}'
        if reason:
            raise PydanticCustomError("environment", "{reason}", {"reason": reason})
        return self
