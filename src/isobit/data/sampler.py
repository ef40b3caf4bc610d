"""The order in which training visits its prompts or examples: one permutation for each epoch.

The permutation sorts the indices by a hash of (seed, epoch, index), so that it depends on no
generator and no library's version, and two numbers are the sampler's state.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b

from isobit.records.text import Prompt
from isobit.util.errors import DataError


class PromptSampler:
    """Endless batches of ``prompts_per_step`` prompts, each with its visit: how often it was seen
    before.

    A batch may span epochs; one larger than the dataset holds a prompt more than once, with
    different visits.
    """

    def __init__(
        self, prompts: Sequence[Prompt], prompts_per_step: int, seed: int, shuffle: bool = True
    ) -> None:
        if not prompts:
            raise DataError("there are no prompts to train on")
        self._prompts = prompts
        self._prompts_per_step = prompts_per_step
        self._seed = seed
        self._shuffle = shuffle
        self._go_to(epoch=0, cursor=0)

    def next(self, count: int | None = None) -> list[tuple[Prompt, int]]:
        """The next ``count`` pairs (prompt, visit), by default ``prompts_per_step``."""
        batch = []
        for _ in range(self._prompts_per_step if count is None else count):
            if self._cursor == len(self._order):
                self._go_to(self._epoch + 1, cursor=0)
            batch.append((self._prompts[self._order[self._cursor]], self._epoch))
            self._cursor += 1
        return batch

    def state(self) -> dict[str, int]:
        """The state for ``restore``; ``prompts`` detects another dataset."""
        return {"epoch": self._epoch, "cursor": self._cursor, "prompts": len(self._prompts)}

    def restore(self, state: Mapping[str, int], other_prompts: bool = False) -> None:
        """Continue from ``state``; with ``other_prompts`` than at that time, from the next epoch.
        Raises ``DataError`` if the dataset has another size.
        """
        if other_prompts:
            self._go_to(state["epoch"] + 1, cursor=0)
            return
        if state["prompts"] != len(self._prompts):
            raise DataError(
                f"the sampler's state is of {state['prompts']} prompts, but the dataset has "
                f"{len(self._prompts)}; resume with the same data"
            )
        self._go_to(state["epoch"], state["cursor"])

    def give_again(self, count: int) -> None:
        """Let the last ``count`` prompts come next."""
        place = self._epoch * len(self._prompts) + self._cursor - count
        if count:
            self._go_to(*divmod(place, len(self._prompts)))

    def _go_to(self, epoch: int, cursor: int) -> None:
        self._epoch, self._cursor = epoch, cursor
        self._order = range(len(self._prompts))
        if self._shuffle:
            start = f"{self._seed}/{epoch}"
            self._order = sorted(
                self._order,
                key=lambda index: blake2b(f"{start}/{index}".encode(), digest_size=16).digest(),
            )
