"""Experience replay: completions of earlier steps that are learnt from again.

A completion is kept as it was sampled: its tokens, and for each response token the log-probability
that was recorded, which in an exact flow is exact for the weights of its version, and that version.
The loss's ratio to the recorded log-probabilities corrects for the weights having moved on.

    kept of L tokens:   17 L bytes (``isobit.records.sequence``) and a constant

What is too old goes (``max_staleness``, in updates), and the oldest where the bytes are too many.

A draw is without replacement: those with the largest u^(1/w), where u in (0, 1) is a hash of (run
seed, draw, completion).  That draws in proportion to w (Efraimidis and Spirakis, "Weighted random
sampling with a reservoir", 2006), which is 1 for all, or |A|.  So a draw is a function of the seed
and of what is kept, and a resumed run makes the same ones.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import torch

from isobit.config.algorithm import ReplayConfig
from isobit.records.sequence import COLUMNS, TokenSequence
from isobit.records.text import Completion, Group, Prompt
from isobit.records.wire import joined, parted

_CONSTANT_BYTES = 1024
"""Bytes of a completion whatever its length, generously: the record and the heads of its arrays,
which take some 110 bytes each.
"""
_NO_PROMPT = Prompt("", "", ())
_NOT_KEPT = {
    column.name: None if column.optional else column.fill
    for column in COLUMNS
    if not column.replayed
}
"""What was added for one step is not kept; nor are the experts, which other weights chose, nor the
truncated distribution, which is not learnt from.
"""


@dataclass(frozen=True, slots=True)
class _Kept:
    """One completion."""

    number: int
    """Its number among all that the run has kept; draws are keyed by it."""
    sequence: TokenSequence
    """The columns that sampling recorded and that are learnt from."""
    reward: float
    advantage: float
    truncated: bool

    @property
    def num_bytes(self) -> int:
        return self.sequence.num_bytes + _CONSTANT_BYTES

    @property
    def oldest(self) -> int:
        """The oldest weights that drew of it."""
        return int(self.sequence.of_response(self.sequence.weights_versions).min())

    @property
    def group(self) -> Group:
        """The completion alone, without prompt and text."""
        completion = Completion(self.sequence, "", "length" if self.truncated else "stop")
        return Group(_NO_PROMPT, 0, [completion], [self.reward], advantages=[self.advantage])


class ReplayBuffer:
    """The completions that may be learnt from again."""

    def __init__(self, config: ReplayConfig, seed: int) -> None:
        self.config, self._seed = config, seed
        self._kept: deque[_Kept] = deque()
        self._bytes = 0
        self._added = self._draws = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        """Bytes of all that is kept."""
        return self._bytes

    def draw(self, fresh: int, version: int) -> list[Group]:
        """Completions to go with ``fresh`` others, as many as ``fraction`` asks for or as there
        are, in the order in which they were kept: each a group of its own, with the advantage that
        it had when it was fresh.  ``version`` is that of the present weights.  Nothing changes:
        until ``keep`` it is the same draw.
        """
        wanted = self.config.beside(fresh)
        oldest = self._oldest(version)
        candidates = [one for one in self._kept if one.oldest >= oldest and self._weight(one) > 0]
        drawn = sorted(candidates, key=self._rank, reverse=True)[:wanted]
        return [one.group for one in sorted(drawn, key=lambda one: one.number)]

    def keep(self, estimated: Sequence[Group], version: int) -> None:
        """Keep the completions of a step that have an advantage, once it has learnt from them; the
        stale go, and the oldest where the bytes are too many.
        """
        self._draws += 1
        oldest = self._oldest(version)
        new = list(_kept(estimated, self._added))
        self._added += len(new)
        self._hold(one for one in (*self._kept, *new) if one.oldest >= oldest)
        while self._bytes > self.config.max_mib * (1 << 20):
            self._bytes -= self._kept.popleft().num_bytes

    def state(self) -> dict[str, int]:
        """Its counters, for ``restore``."""
        return {"added": self._added, "draws": self._draws}

    def tensors(self) -> dict[str, torch.Tensor]:
        """What is kept, as a checkpoint holds it: tensors of all completions end to end."""
        kept = list(self._kept)
        return {
            "numbers": torch.tensor([one.number for one in kept], dtype=torch.int64),
            **joined([one.sequence for one in kept]),
            "rewards": torch.tensor([one.reward for one in kept], dtype=torch.float64),
            "advantages": torch.tensor([one.advantage for one in kept], dtype=torch.float64),
            "truncated": torch.tensor([one.truncated for one in kept], dtype=torch.bool),
        }

    def restore(self, state: Mapping[str, int], tensors: Mapping[str, torch.Tensor]) -> None:
        """Go on where ``state`` and ``tensors`` were taken."""
        self._added, self._draws = state["added"], state["draws"]
        scalars = ("rewards", "advantages", "truncated")
        rows = zip(
            tensors["numbers"].tolist(),
            parted(tensors, fresh=False),
            *(tensors[name].tolist() for name in scalars),
            strict=True,
        )
        self._hold(_Kept(*row) for row in rows)

    def _hold(self, kept: Iterable[_Kept]) -> None:
        self._kept = deque(kept)
        self._bytes = sum(one.num_bytes for one in self._kept)

    def _oldest(self, version: int) -> int:
        """The oldest weights from which a completion may come."""
        return version - self.config.max_staleness

    def _weight(self, kept: _Kept) -> float:
        return 1.0 if self.config.sampling == "uniform" else abs(kept.advantage)

    def _rank(self, kept: _Kept) -> float:
        """log u / w, which orders as u^(1/w) does, and underflows for no weight."""
        name = f"{self._seed}/{self._draws}/{kept.number}".encode()
        bits = int.from_bytes(blake2b(name, digest_size=8).digest(), "little")
        return math.log((bits + 0.5) / (1 << 64)) / self._weight(kept)


def _kept(estimated: Sequence[Group], number: int) -> Iterator[_Kept]:
    """Those with an advantage, numbered from ``number``."""
    for group in estimated:
        rows = zip(group.completions, group.rewards, group.advantages, strict=True)
        for completion, reward, advantage in rows:
            if advantage is None:
                continue
            assert reward is not None, "what is learnt from has a reward"
            sequence = replace(completion.sequence.with_columns(**_NOT_KEPT), fresh=False)
            truncated = completion.is_cut
            yield _Kept(number, sequence, reward, advantage, truncated)
            number += 1
