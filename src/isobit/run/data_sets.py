"""The sets that a training reads, whatever it learns from: the rows to learn from without those
whose prompt is evaluated, and each evaluation set.

``data.streaming`` keeps the rows to learn from in a temporary file.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from isobit.config.data import DataConfig, SftDataConfig
from isobit.data.prompts import Noticed, TooLong, check_any_left, drop_evaluated
from isobit.data.spool import Spool, in_chunks
from isobit.records.text import Prompt

Item = TypeVar("Item")
Build: TypeAlias = Callable[[str, Any, TooLong, Noticed, int], Sequence[Item]]
"""What a set holds, of its name and its source, or of rows from one with a number on; what is too
long or stands out is counted in the two records.
"""


@dataclass(frozen=True, slots=True)
class DataSets(Generic[Item]):
    """All sets of a training."""

    train: Mapping[str, Item]
    """What is learnt from, by the id of its prompt; a ``Spool`` where it is streamed."""
    dropped: int
    """Training rows left out because an evaluation set holds their prompt too."""
    evaluated: Mapping[str, Sequence[Item]]
    too_long: Mapping[str, TooLong]
    """What was too long, of the sets where something was, and what became of it."""
    noticed: Mapping[str, Noticed]

    @property
    def spool(self) -> Spool[Item] | None:
        """The temporary file of what is learnt from, where that is streamed."""
        return self.train if isinstance(self.train, Spool) else None

    @property
    def in_order(self) -> Sequence[Item]:
        """What is learnt from, in the order of the rows."""
        if isinstance(self.train, Spool):
            return self.train.items_in_order
        return list(self.train.values())


def read_data_sets(
    data: DataConfig | SftDataConfig,
    build: Build[Item],
    build_evaluated: Build[Item],
    rows: Callable[[], Iterable[Any]],
    prompt_of: Callable[[Item], Prompt],
) -> DataSets[Item]:
    """Read all sets: ``build`` makes what is learnt from, of the source or, where it is streamed,
    of chunks of its ``rows``.  Raises DataError where nothing is left to learn from.
    """
    too_long = {"train": TooLong(data.too_long, in_parts=data.streaming)}
    noticed = {"train": Noticed()}
    rest = list[Item]()
    if not data.streaming:
        rest = list(build("train", data.train, too_long["train"], noticed["train"], 0))
    evaluated = dict[str, Sequence[Item]]()
    for name, source in data.eval.items():
        too_long[name], noticed[name] = TooLong(data.too_long), Noticed()
        evaluated[name] = build_evaluated(name, source, too_long[name], noticed[name], 0)
    prompts = [[prompt_of(item) for item in items] for items in evaluated.values()]
    if data.streaming:
        counts, seen = too_long["train"], noticed["train"]

        def build_part(part: Sequence[Any], first: int) -> Sequence[Item]:
            return build("train", part, counts, seen, first)

        train, dropped = _spooled(rows(), prompts, counts, build_part, prompt_of)
    else:
        kept, dropped = drop_evaluated([prompt_of(item) for item in rest], prompts)
        by_id = {prompt_of(item).id: item for item in rest}
        train = {prompt.id: by_id[prompt.id] for prompt in kept}
    not_empty = {name: counts for name, counts in too_long.items() if counts.describe()}
    return DataSets(train, dropped, evaluated, not_empty, noticed)


def _spooled(
    rows: Iterable[Any],
    evaluated: Iterable[Sequence[Prompt]],
    too_long: TooLong,
    build: Callable[[Sequence[Any], int], Sequence[Item]],
    prompt_of: Callable[[Item], Prompt],
) -> tuple[Spool[Item], int]:
    """What ``build`` makes of chunks of rows, and the number of the first one in each, but without
    evaluated prompts, in a spool; and how many were left out.
    """
    texts, dropped = {prompt.text for prompts in evaluated for prompt in prompts}, 0

    def kept() -> Iterator[Item]:
        nonlocal dropped
        first = 0
        for chunk in in_chunks(rows):
            for item in build(chunk, first):
                if prompt_of(item).text not in texts:
                    yield item
                else:
                    dropped += 1
            first += len(chunk)

    spool = Spool(kept(), lambda item: prompt_of(item).id)
    check_any_left("train", spool, dropped, too_long)
    return spool, dropped
