"""The date that chat templates write, for those that read the clock: one for a whole run."""

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from isobit.config.data import ChatConfig
from isobit.config.recipes import RunConfig, SftConfig
from isobit.data.chat_template import reads_clock
from isobit.parallel.world import ALONE, World, broadcast

Chat = TypeVar("Chat", bound=ChatConfig)
AnyRecipe = TypeVar("AnyRecipe", bound=RunConfig | SftConfig)


def now() -> datetime:
    return datetime.now().replace(microsecond=0)


def with_date(
    chat: Chat,
    folders: Sequence[Path],
    world: World = ALONE,
    known: Callable[[], datetime | None] = lambda: None,
) -> Chat:
    """Settings of chat templates with a date, the same on all ranks: where none is set and a
    template of the model ``folders`` reads the clock, the date that is ``known``, or the time now.
    """

    def date() -> str | None:
        reads = any(map(reads_clock, folders))
        return (known() or now()).isoformat() if reads else None

    if chat.date is not None:
        return chat
    date_text = broadcast(world, date)
    return chat if date_text is None else chat.model_copy(update={"date": date_of(date_text)})


def with_date_of(
    config: AnyRecipe,
    model: Path,
    reward_models: Iterable[Path],
    world: World = ALONE,
    known: Callable[[], datetime | None] = lambda: None,
) -> AnyRecipe:
    """A recipe with one date for the templates of the folders of its model and its reward models,
    as ``with_date`` chooses it.
    """
    folders = [*([model] if config.data.chat else []), *reward_models]
    data = with_date(config.data, folders, world, known)
    return config if data is config.data else config.model_copy(update={"data": data})


def date_of(text: str) -> datetime:
    return datetime.fromisoformat(text)
