"""What a rollout loses to tools that take their time, beside the same rollout whose tools answer at
once, and beside a loop in lock-step.

    python -m benchmarks.tool_latency [--shape tiny] [--device cpu] [--precision fp8]
        [--prompts 32] [--samples 8] [--turns 6] [--turn-tokens 24] [--median 0.4] [--sigma 0.8]
        [--max-sequences 64] [--kv-pages N] [--at-once N] [--patience 8] [--rounds 3]
        [--out FILE]

``tiny`` is a layer that is fast enough on a CPU for two seconds to matter; a real shape is for a
GPU.  Random weights draw turns of some 24 tokens; behind each but the last of an episode stands a
call, whose latency is drawn from a log-normal distribution, up to 2 s, by the turn's text.  So all
arms draw the same tokens, which is checked, and wait for the same latencies:

    at once     every tool answers at once, by the same processes
    waits       tools take their time, and other episodes are drawn meanwhile
    lock-step   no episode goes on before all have had their answers, as in a loop over turns that
                calls ``generate`` and then all tools: the slowest tool holds up everybody
    recomputes  as ``waits``, with K and V given up while a tool runs

*Busy* is the share of the wall clock in steps of the engine, *idle* the share in which all
episodes waited for tools; the rest is the host's work on turns.  On a CPU that others use ``cpu_s``
is the time that this process had.  The arms take turns, and a ratio is taken within one round; the
medians over the rounds are reported.  ``--patience`` is the number of steps for which turns that
come back wait to start together, on a GPU.
"""

import argparse
import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
from transformers import AutoTokenizer

# isort: off
import isobit  # noqa: F401 (sets how OpenMP spins, before torch is imported)

# isort: on
from benchmarks.cases import precision_of
from benchmarks.common import make_parser, run_command, write_json
from isobit.config.data import ChatConfig
from isobit.config.environment import EnvironmentConfig
from isobit.config.rollout import RolloutConfig
from isobit.data.continuation import Continuation
from isobit.data.tool_calls import Said, ToolCall
from isobit.environments.pool import Environments, TurnAnswer
from isobit.models.config import ModelConfig
from isobit.models.policy import Policy, random_policy
from isobit.models.shapes import model_shape
from isobit.parallel.world import ALONE
from isobit.records.text import Completion, Prompt, SamplingParams
from isobit.rollout import episodes, executor
from isobit.rollout.engine import Follow, SampleEvent
from isobit.rollout.engine_stats import EngineStats
from isobit.rollout.episodes import Episodes, Tools
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Handle, Request
from isobit.run.acting import open_environments
from isobit.starter import starter_folder
from isobit.store.reward_record import AnswerRecord

LONGEST_S = 2.0
PROMPT_TOKENS = 24
RESULT_TOKENS = 24
"""Room for one."""
TINY = ModelConfig("qwen3", 128, 64, 128, 1, 1, 1, 64, 512, 1e-6, 1e4, True)
ARMS = ("at once", "waits", "lock-step", "recomputes")


class TimedEngine(NativeEngine):
    """Counts the time of its steps, how many sequences took part, and the time without any."""

    steps_s = idle_s = 0.0
    _idle_since: float | None = None
    running_s = 0.0
    """Running sequences, each for as long as a step took."""

    def step(self) -> list[SampleEvent]:
        began = perf_counter()
        if not self.num_live:
            self._idle_since = self._idle_since or began
            return super().step()
        self.idle_s += began - (self._idle_since or began)
        self._idle_since = None
        events = super().step()
        seconds = perf_counter() - began
        self.steps_s += seconds
        self.running_s += seconds * self.num_running
        return events


class ForgetfulEngine(TimedEngine):
    """Gives up K and V at the end of each turn."""

    def submit(self, requests: Sequence[Request], follow: Follow = "end") -> list[list[Handle]]:
        return super().submit([replace(one, comes_back=False) for one in requests], follow)

    def admit(self, requests: Sequence[Request], half_done: Mapping[Handle, Completion]) -> None:
        super().admit([replace(one, comes_back=False) for one in requests], half_done)


class LockStep:
    """Environments whose answers are told once all have answered and nothing is drawn."""

    def __init__(self, environments: Environments[Handle], engine: NativeEngine) -> None:
        self._environments, self._engine = environments, engine
        self._held: list[tuple[Handle, TurnAnswer]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environments, name)

    def poll(self, timeout_s: float = 0.0) -> list[tuple[Handle, TurnAnswer]]:
        self._held += self._environments.poll(timeout_s)
        if self._engine.num_live or self._environments.num_waiting:
            return []
        found, self._held = self._held, []
        return found


def readable_tokenizer() -> Any:
    """The starter's, which has a character for each token id of any model, so that two turns have
    two texts.
    """
    tokenizer = AutoTokenizer.from_pretrained(str(starter_folder()))
    tokenizer.decode = lambda ids, **_: "".join(chr(0x4E00 + token % 20_000) for token in ids)
    return tokenizer


def latency(text: str, median_s: float, sigma: float) -> float:
    return min(LONGEST_S, Random(text).lognormvariate(math.log(median_s), sigma))  # noqa: S311


@contextmanager
def every_turn_calls(arguments: argparse.Namespace) -> Iterator[list[float]]:
    """A block in which each turn of a random model is a call; the latencies that were asked for."""
    asked: list[float] = []

    def read(text: str, *_: Any) -> Said:
        asked.append(latency(text, arguments.median, arguments.sigma))
        return Said(text, [ToolCall("look_up", {"seconds": asked[-1]})])

    before = episodes.read_turn
    episodes.read_turn = read
    try:
        yield asked
    finally:
        episodes.read_turn = before


def make_requests(config: ModelConfig, arguments: argparse.Namespace) -> list[Request]:
    """Turns end with one of so many tokens that they have ``turn_tokens`` in the mean."""
    random, turns = Random(0), arguments.turns  # noqa: S311 (no secret)
    every = max(2, arguments.turn_tokens)
    most = (3 * arguments.turn_tokens + RESULT_TOKENS) * turns
    sampling = SamplingParams(
        min(most, config.max_positions - PROMPT_TOKENS),
        stop_token_ids=tuple(range(0, config.vocab_size, every)),
    )
    prompts = [
        Prompt(f"bench/{n}", "", tuple(random.choices(range(config.vocab_size), k=PROMPT_TOKENS)))
        for n in range(arguments.prompts)
    ]
    return [Request(prompt, 0, arguments.samples, sampling) for prompt in prompts]


def play(
    arm: str, policy: Policy, tokenizer: Any, arguments: argparse.Namespace
) -> tuple[list[list[Completion]], dict[str, float]]:
    """One rollout of all episodes in one arm: what was drawn, and its figures."""
    sizes = {"max_sequences": arguments.max_sequences, "kv_pages": arguments.kv_pages}
    kind = ForgetfulEngine if arm == "recomputes" else TimedEngine
    engine = kind(policy, RolloutConfig.model_validate(sizes), tokenizer, seed=0)
    requests = make_requests(policy.config, arguments)
    episodes_count = arguments.prompts * arguments.samples
    config = EnvironmentConfig.model_validate(
        {
            "class": f"{Path(__file__).with_name('slow_tool.py')}:SlowTool",
            "options": {"scale": float(arm != "at once")},
            "max_turns": arguments.turns,
            "at_once": arguments.at_once or min(episodes_count, 4096),
            "episode_s": 1000.0,
        }
    )
    continuation = Continuation(tokenizer, ChatConfig(), "plain", [], (0,))
    with every_turn_calls(arguments) as asked, open_environments(config, tokenizer) as environments:
        told: Any = LockStep(environments, engine) if arm == "lock-step" else environments
        tools, record = Tools([], "plain", continuation), AnswerRecord(lambda _: None)
        context = policy.config.max_positions
        episodes = Episodes(config, tools, told, record, tokenizer, context, engine)
        began, cpu_began = perf_counter(), process_time()
        made, _, stats = episodes.generate(ALONE, policy.version, requests)
        seconds, cpu_s = perf_counter() - began, process_time() - cpu_began
    figures = _figures(engine, stats, seconds, made)
    return made, {**figures, "cpu_s": cpu_s, "latency_mean_s": sum(asked) / len(asked)}


def _figures(
    engine: TimedEngine, stats: EngineStats, seconds: float, made: Sequence[Sequence[Completion]]
) -> dict[str, float]:
    turns = [len(one.episode.turns) for group in made for one in group if one.episode]
    return {
        "seconds": seconds,
        "busy": engine.steps_s / seconds,
        "idle": engine.idle_s / seconds,
        "tokens_per_s": stats.generated_tokens / seconds,
        "running": engine.running_s / engine.steps_s,
        "episodes": len(turns),
        "turns": sum(turns) / len(turns),
        "forwards": stats.forwards,
        "generated_tokens": stats.generated_tokens,
        "kept_tokens": stats.kept_tokens,
        "prompt_tokens": stats.prompt_tokens,
    }


def run(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(arguments.threads)
    executor.PipelinedExecutor.patience = arguments.patience
    tokenizer = readable_tokenizer()
    shape = arguments.shape
    config = TINY if shape == "tiny" else model_shape(shape)
    precision = precision_of(arguments.precision)
    policy = random_policy(config, precision, 0, arguments.device, trainable=False)
    play("at once", policy, tokenizer, arguments)  # which warms up
    rounds: list[dict[str, dict[str, float]]] = []
    drawn = set[int]()
    for _ in range(arguments.rounds):
        rounds.append({})
        for arm in ARMS:
            made, rounds[-1][arm] = play(arm, policy, tokenizer, arguments)
            drawn.add(hash(tuple(one.sequence for group in made for one in group)))
            print(arm, {name: round(value, 3) for name, value in rounds[-1][arm].items()})
    assert len(drawn) == 1, "all arms draw the same tokens with the same log-probabilities"
    result = {
        "shape": shape,
        "device": _device(arguments),
        "arguments": {k: v for k, v in vars(arguments).items() if k not in ("run", "out")},
        "arms": {
            arm: {name: median(one[arm][name] for one in rounds) for name in rounds[0][arm]}
            for arm in ARMS
        },
        "of_at_once": {
            arm: {
                name: median(one[arm][name] / one["at once"][name] for one in rounds)
                for name in ("busy", "tokens_per_s")
            }
            for arm in ARMS[1:]
        },
    }
    for arm, ratios in result["of_at_once"].items():
        print(f"{arm:10} of the rollout whose tools answer at once:", end=" ")
        print(", ".join(f"{name} {value:.1%}" for name, value in ratios.items()))
    write_json(arguments.out, result)


def _device(arguments: argparse.Namespace) -> str:
    if arguments.device != "cpu":
        return torch.cuda.get_device_name(0)
    machine = platform.processor() or platform.machine()
    return f"{machine}, {arguments.threads} threads, torch {torch.__version__}"


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--shape", default="tiny", help="random weights of this shape")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp8")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--turn-tokens", type=int, default=24, help="in the mean")
    parser.add_argument("--median", type=float, default=0.4, help="seconds of a tool")
    parser.add_argument("--sigma", type=float, default=0.8, help="of the logarithm")
    parser.add_argument("--max-sequences", type=int, default=64)
    parser.add_argument("--kv-pages", type=int)
    parser.add_argument("--at-once", type=int, help="tools that run at once; by default all")
    parser.add_argument("--patience", type=int, default=executor.PATIENCE, help="in steps")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.set_defaults(run=run)
    return run_command(parser)


if __name__ == "__main__":
    raise SystemExit(main())
