"""Single bits flipped on purpose in one step of reinforcement learning on a CPU: who sees them?

    python -m experiments.bit_flips [--flips 1000] [--seed 0] [--out FILE]

A step of a small random model in ``fp8``, with ``check.state`` and ``check.repeat_every = 1``:
completions are sampled, what the update before has left is compared, a micro-batch is computed
twice, the update is taken.  In each run of it one bit is flipped, at a random moment, in

    weights         the bytes and scales that both sides read
    cache           K and V and their scales, of any page
    activations     what an operation of either forward has given and the next one reads
    moments         masters and AdamW's moments

    caught   the step's own checks say so: weights, masters or moments are not what was left, a
             log-probability differs from the recorded one, the micro-batch did not repeat, or a
             number is not finite
    masked   all that the step leaves (completions, log-probabilities, published weights, masters,
             moments) has the bits of the run without a flip: no bit that anyone read changed, or
             the flipped bit was written anew
    missed   anything else; by the reason that the place gives (``REASONS``)
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal, get_args

import torch

from isobit.algorithms.advantages import group_advantages
from isobit.algorithms.registry import build_algorithm
from isobit.config.algorithm import GrpoConfig
from isobit.config.precision import PrecisionConfig
from isobit.config.rollout import RolloutConfig
from isobit.config.training import TrainingConfig
from isobit.kernels.observing import UNROUNDED, observing
from isobit.memory.cache_size import CacheSize
from isobit.models.config import ModelConfig
from isobit.models.policy import Policy, random_policy
from isobit.models.safetensors import checksum_of
from isobit.precision.quant_tensor import QuantTensor
from isobit.records.packing import pack, sequences_of
from isobit.records.text import Group, Prompt, SamplingParams
from isobit.rollout.engine import generate
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Request
from isobit.rollout.runner import PolicyRunner
from isobit.training.trainer import Trainer
from isobit.util.errors import IsobitError

Kind = Literal["weights", "cache", "activations", "moments"]
KINDS: tuple[Kind, ...] = get_args(Kind)
SHAPE = ModelConfig("qwen3", 48, 32, 48, 1, 2, 1, 16, 128, 1e-6, 1e4, tied_embeddings=True)
REASONS: dict[str, str] = {
    "during the update": "the update's own pass is not computed twice: the alarm is for faults "
    "that come again",
    "between passes": "what stands was compared before the step began to learn, and a weight that "
    "stays flipped is read alike by every later pass",
    "before the update": "what stands was compared before the step began to learn",
    "sampled": "the choice of a token is not computed again: the token is in the batch, with the "
    "log-probability that the model gives it",
}
_PROMPTS = ((3, 1, 4, 1, 5), (9, 2, 6, 5, 3, 5, 8, 9, 7))
_NEW_TOKENS, _SAMPLES = 6, 2


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    return parser


@dataclass(frozen=True, slots=True)
class Outcome:
    kind: Kind
    where: str
    state: Literal["caught", "masked", "missed"]
    reason: str = ""


class Moments:
    """The moments of a step at which a bit may flip: counted in a run without a flip, and one of
    them chosen in the others.
    """

    def __init__(self, chosen: int | None, flip: Callable[[str, list[torch.Tensor]], None]) -> None:
        self.count, self._chosen, self._flip = 0, chosen, flip

    def __call__(self, phase: str, tensors: list[torch.Tensor]) -> None:
        """One of them, in a phase; ``tensors`` are what may be hit."""
        if self.count == self._chosen:
            self._flip(phase, tensors)
        self.count += 1


def run_step(kind: Kind, at: Moments) -> tuple[bool, dict[str, Any]]:
    """One step; -> whether its checks raised an alarm, and the bits of all that it leaves."""
    policy = random_policy(SHAPE, PrecisionConfig(preset="fp8"), seed=0)
    config = TrainingConfig.model_validate({"tokens_per_microbatch": 24, "learning_rate": 1e-3})
    trainer, algorithm = Trainer(policy, config, total_updates=4), build_algorithm(GrpoConfig())
    trainer.restore({"updates": 1, "skipped_in_a_row": 0}, dict(_moments_of_one_update(policy)))

    def stands(moment: str) -> None:
        """Let a bit of the state between two updates flip."""
        if kind == "weights":
            at(moment, published(policy))
        elif kind == "moments":
            at(moment, list(_state(trainer)))

    engine = NativeEngine(
        policy,
        RolloutConfig(max_new_tokens=_NEW_TOKENS, kv_pages=6),
        None,
        0,
        make_runner=lambda shared, size: _Watched(shared, size, kind, at, stands),
    )
    phase, left_before = ["rollout"], _checksums(trainer)

    def see(name: str, values: torch.Tensor, scales: torch.Tensor | None) -> None:
        if kind == "activations" and not name.endswith(UNROUNDED) and "kv_cache" not in name:
            at(f"{phase[0]}: {name}", [values] if scales is None else [values, scales])

    stands("before sampling")
    with observing(see):
        groups = _sample(engine)
        batches = pack(
            sequences_of(groups, [group_advantages(g.rewards, True) for g in groups]), 24
        )
        stands("after sampling")
        alarm = _checksums(trainer) != left_before
        phase[0] = "repeat"
        with _before_each_pass(trainer, lambda: stands("between passes")):
            repeat = trainer.repeat(batches, algorithm, 0)
            stands("before the update")
            phase[0] = "update"
            update = trainer.update(batches, algorithm, compare=True)
    alarm |= bool(repeat.differing) or update.comparison.differs or update.skipped is not None
    left = [*published(policy), *_state(trainer)]
    return alarm, {
        "tokens": [(c.token_ids, c.log_probs) for g in groups for c in g.completions],
        "bits": [bytes(x.detach().reshape(-1).view(torch.uint8).numpy().data) for x in left],
    }


def campaign(flips: int, seed: int) -> list[Outcome]:
    """Flip as many bits of each kind, at uniformly random moments of a step."""
    random, found = Random(seed), list[Outcome]()  # noqa: S311 (no secret)
    clean: dict[Kind, tuple[int, dict[str, Any]]] = {}
    for kind in KINDS:
        at = Moments(None, lambda phase, tensors: None)
        alarm, left = run_step(kind, at)
        assert not alarm, "a step without a flip has no alarm"
        clean[kind] = at.count, left
    for index in range(flips):
        kind = KINDS[index % len(KINDS)]
        moments, expected = clean[kind]
        found.append(_one(kind, random.randrange(moments), random, expected))
    return found


def _one(kind: Kind, moment: int, random: Random, expected: dict[str, Any]) -> Outcome:
    where = [""]

    def flip(phase: str, tensors: list[torch.Tensor]) -> None:
        where[0] = phase
        flip_bit(random, tensors)

    try:
        alarm, left = run_step(kind, Moments(moment, flip))
    except IsobitError:
        return Outcome(kind, where[0], "caught")
    if alarm:
        return Outcome(kind, where[0], "caught")
    if left == expected:
        return Outcome(kind, where[0], "masked")
    return Outcome(kind, where[0], "missed", reason_of(where[0], left, expected))


def reason_of(where: str, left: dict[str, Any], expected: dict[str, Any]) -> str:
    """Which of ``REASONS`` a missed flip has."""
    if where in REASONS:
        return where
    if where.startswith("update"):
        return "during the update"
    return "sampled" if left["tokens"] != expected["tokens"] else "unexplained"


def flip_bit(random: Random, tensors: list[torch.Tensor]) -> None:
    """One of all their bits, in place; of those that lie in one piece."""
    flat = [x.detach().view(-1).view(torch.uint8) for x in tensors if x.is_contiguous()]
    place = random.randrange(sum(x.numel() for x in flat)) if flat else 0
    for x in flat:
        if place < x.numel():
            x[place] ^= 1 << random.randrange(8)
            return
        place -= x.numel()


def published(policy: Policy) -> list[torch.Tensor]:
    """Everything that a forward of the policy reads."""
    weights = policy.weights("training")
    found = list(weights.plain.values())
    for linear in weights.linears.values():
        matrix = linear.matrix
        assert isinstance(matrix, QuantTensor)
        found += [matrix.values, matrix.scales]
    return found


class _Watched(PolicyRunner):
    """Before each forward of the rollout a bit may flip."""

    def __init__(
        self, policy: Any, size: CacheSize, kind: Kind, at: Moments, stands: Callable[[str], None]
    ) -> None:
        super().__init__(policy, size)
        self._kind, self._at, self._stands = kind, at, stands

    def forward(self, batch: Any) -> Any:
        if self._kind == "cache":
            arenas: Any = self._cache
            self._at(
                "cache", [x for one in arenas.layers.values() for x in (one.values, one.scales)]
            )
        self._stands("while sampling")
        return super().forward(batch)


@contextmanager
def _before_each_pass(trainer: Trainer, happen: Callable[[], None]) -> Iterator[None]:
    """Let a bit of the state flip before any round."""
    gradient: Any = trainer.policy.gradient
    exact = gradient.begin_round

    def begin_round(active: int) -> None:
        happen()
        exact(active)

    gradient.begin_round = begin_round
    try:
        yield
    finally:
        del gradient.begin_round


def _sample(engine: NativeEngine) -> list[Group]:
    sampling = SamplingParams(_NEW_TOKENS, 1.0)
    prompts = [Prompt(f"flip/{i}", "", ids) for i, ids in enumerate(_PROMPTS)]
    made = generate(engine, [Request(prompt, 0, _SAMPLES, sampling) for prompt in prompts])
    return [
        Group(prompt, 0, completions, [float(i) for i in range(len(completions))])
        for prompt, completions in zip(prompts, made, strict=True)
    ]


def _moments_of_one_update(policy: Policy) -> Iterator[tuple[str, torch.Tensor]]:
    """Small moments made from the masters, as if one update had been taken."""
    for name, master in policy.masters.items():
        yield f"{name}.exp_avg", 1e-3 * master.detach()
        yield f"{name}.exp_avg_sq", 1e-6 * master.detach().square()
        yield f"{name}.step", torch.tensor(1.0)


def _state(trainer: Trainer) -> Iterator[torch.Tensor]:
    yield from (master.detach() for master in trainer.policy.masters.values())
    yield from trainer.moments().values()


def _checksums(trainer: Trainer) -> tuple[int, int]:
    """Checksums of all state that is kept between two updates."""
    state = {str(place): tensor for place, tensor in enumerate(_state(trainer))}
    return trainer.policy.checksum(), checksum_of(state)


def table(found: list[Outcome]) -> dict[str, Any]:
    """Counts by kind and state, and of the missed by reason."""
    by_kind = {kind: Counter(one.state for one in found if one.kind == kind) for kind in KINDS}
    reasons = Counter(one.reason for one in found if one.state == "missed")
    return {
        "flips": len(found),
        "all": dict(Counter(one.state for one in found)),
        **{kind: dict(counts) for kind, counts in by_kind.items()},
        "missed": dict(reasons),
    }


def main() -> int:
    arguments = make_parser().parse_args()
    torch.set_num_threads(1)
    made = table(campaign(arguments.flips, arguments.seed))
    for kind in ("all", *KINDS):
        counts = made[kind]
        states = "  ".join(f"{counts.get(s, 0):>5} {s}" for s in ("caught", "masked", "missed"))
        print(f"{kind:<12} {states}")
    for reason, count in made["missed"].items():
        print(f"missed {count:>5}: {reason}: {REASONS.get(reason, 'no reason is known')}")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
