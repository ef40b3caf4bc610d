"""The messages of an environment backend: its start, the model's turns and calls, and its answers.

A host loads a backend, and an episode's process runs it (``isobit.environments.worker``):

    class       a class whose public methods are the tools (``isobit.environments.tool_classes``)
    verifiers   an environment of the package ``verifiers``, which leads the conversation itself
                (``isobit.environments.verifiers_classic``; of version 0.4,
                ``isobit.environments.tasksets``)
    openenv     an OpenEnv server (``isobit.environments.openenv``)
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from isobit.rewards.grade import Failure, Outcome


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    positional: Sequence[Any]
    arguments: Mapping[str, Any]

    def by_name(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments, where those without a name have those of ``schema`` in turn."""
        names = schema.get("properties") or {}
        return {**dict(zip(names, self.positional, strict=False)), **self.arguments}


@dataclass(frozen=True, slots=True)
class Turn:
    calls: Sequence[Call]
    text: str = ""
    """The text without the calls."""
    is_cut: bool = False
    """Whether the length limit ended the turn."""


@dataclass(frozen=True, slots=True)
class HostStart:
    """The first message to a host."""

    kind: Literal["class", "verifiers", "openenv"]
    place: str
    options: Mapping[str, Any]
    deadline_s: float
    """Seconds for the calls of a turn, and for ``reset`` before the first."""
    memory_bytes: int
    most_characters: int
    """The longest result in characters; the rest is cut off."""
    packed: bytes = b""
    """The class, where it was given from Python (``isobit.environments.python_environments``)."""


def rewarded(outcome: Outcome, name: str = "reward") -> dict[str, Any]:
    """A reward, or why there is none, for an answer."""
    if isinstance(outcome, Failure):
        return {"failed": outcome.kind, "message": outcome.message}
    return {name: outcome}


def truncated_result(value: Any, most: int) -> list[str]:
    """A result with its kind, cut to ``most`` characters."""
    text = text_of(value)
    return ["cut", text[:most]] if len(text) > most else ["ok", text]


def text_of(value: Any) -> str:
    """Text as it is, without halves of characters; anything else as JSON."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return str.encode(text, "utf-8", "replace").decode()
