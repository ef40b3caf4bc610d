"""Of what a decode step consists, kernel by kernel: the engine on one Hopper GPU with the shape of
a real model and random weights, in the middle of its answers.

    python -m benchmarks.decode_kernels [--shape smollm2-135m] [--precision fp8] [--sequences 128]
                                        [--tokens 900]

One JSON object: ``step_us`` is the wall time of a step without a profiler, ``kernels_us`` what all
kernels of a step take by the profiler, ``kernels`` the same by name, with launches a step, the
longest first.  What ``step_us`` has beside ``kernels_us`` the GPU waits for: for launches, or for
the host.
"""

import argparse
import json
from time import perf_counter

import torch

from benchmarks.comparison.card import measure_card
from benchmarks.comparison.kernels import kernel_times
from isobit.config.tables import PrecisionConfig, RolloutConfig
from isobit.models.config import model_shape
from isobit.models.policy import random_policy
from isobit.records.text import Prompt, SamplingParams
from isobit.rollout.engine import Request
from isobit.rollout.native import NativeEngine

PROMPT_TOKENS, SAMPLES = 64, 8
STEPS = 50
"""That are timed, and then profiled."""


def make_engine(shape: str, precision: str, sequences: int, tokens: int) -> NativeEngine:
    """An engine whose samples have half of their tokens."""
    config = model_shape(shape)
    policy = random_policy(
        config, PrecisionConfig.model_validate(precision), 0, "cuda", trainable=False
    )
    engine = NativeEngine(policy, RolloutConfig(max_sequences=sequences), None, seed=0)
    generator = torch.Generator().manual_seed(0)
    requests = []
    for i in range(sequences // SAMPLES):
        ids = torch.randint(config.vocab_size, (PROMPT_TOKENS,), generator=generator).tolist()
        requests.append(
            Request(Prompt(f"p{i}", "", tuple(ids)), 0, SAMPLES, SamplingParams(tokens))
        )
    engine.submit(requests)
    for _ in range(tokens // 2):
        engine.step()
    return engine


def measure(engine: NativeEngine) -> dict[str, object]:
    """Microseconds of a step."""
    torch.cuda.synchronize()
    started_at = perf_counter()
    for _ in range(STEPS):
        engine.step()
    torch.cuda.synchronize()
    wall = (perf_counter() - started_at) * 1e6 / STEPS
    found = kernel_times(engine.step, STEPS)
    return {
        "step_us": round(wall, 1),
        "kernels_us": round(sum(time for time, _ in found.values()), 1),
        "kernels": {
            name: {"us": round(time, 2), "launches": launches}
            for name, (time, launches) in found.items()
            if time
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", default="smollm2-135m")
    parser.add_argument("--precision", default="fp8")
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=900)
    given = parser.parse_args()
    card = measure_card()  # before this process uses the card
    engine = make_engine(given.shape, given.precision, given.sequences, given.tokens)
    print(json.dumps({**vars(given), "card": card, **measure(engine)}))


if __name__ == "__main__":
    main()
