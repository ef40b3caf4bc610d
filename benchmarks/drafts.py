"""What guesses cost the host (``isobit.rollout.drafts``), and how many are accepted: known streams
of tokens through the scheduler and the executor of a card, without a card or a model.

    python -m benchmarks.drafts [--against OLDER/src] [--streams FILE.jsonl] > ROWS.jsonl

What is "drawn" stands in streams, in groups of 8 answers for each of two visits of a prompt:
``answers`` are worked sums in which siblings word some steps differently, and now and then make a
mistake; ``zipf`` repeats little; ``recorded`` is a file whose rows have "prompt" and "answers",
token ids. Steps take as long as an 8B model's on an H200, by estimate; in ``costly``, which plays
``answers``, each row takes so much longer that no guess is worth it.

``off_us`` are the microseconds of the host for a sample and step that planning takes without
guesses (what is asked before a plan, the plan, and what is done for samples that have ended), and
``guesses_us`` those that it takes longer with them; ``device`` is by how many times the device's
steps take less time in all, and ``steps``, ``drafted`` and ``accepted`` are counts. ``--against``
plays the same with another tree, in a process of its own, by turns. Of each step's times the least
of ``--repeats`` counts.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

import torch

from isobit.memory.cache_size import PageAllocator
from isobit.records.text import Prompt, SamplingParams
from isobit.rollout.drafts import Drafter
from isobit.rollout.draws import Ready, take_ready
from isobit.rollout.engine_stats import EngineStats
from isobit.rollout.executor import PipelinedExecutor
from isobit.rollout.graph_runner import graph_sizes
from isobit.rollout.order import AnswerLengths
from isobit.rollout.requests import Request
from isobit.rollout.runner import DrawnToken
from isobit.rollout.scheduler import Plan, Scheduler
from isobit.rollout.sequence import Sample, SharedPrompt, States
from isobit.util.strict_json import json_text

SIBLINGS, MOST, PAGE = 8, 7, 64
STEP_S, ROW_SHARE, COSTLY = 3.6e-3, 0.004, 50.0
"""About Qwen3-8B's on an H200, and the share that each row adds."""
SIZES = graph_sizes(128)

Group = tuple[list[int], list[list[int]]]
"""A prompt and its answers."""


class Streams:
    """A ``PipelineRunner`` that draws what is known."""

    version, page_tokens = 0, PAGE

    def __init__(self, row_share: float) -> None:
        self._row_share, self._drawn = row_share, list[DrawnToken]()
        self.known: dict[Sample, list[int]] = {}

    def decode(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            known, first = self.known[sample], sample.length
            for place in range(first, first + 1 + len(sample.draft)):
                token = known[place] if place < len(known) else 0
                self._drawn.append(DrawnToken(sample, token, 0.0))

    def step_seconds(self, rows: int, length: int) -> float:
        is_costly = self._row_share > ROW_SHARE
        size = rows if is_costly else next(size for size in SIZES if size >= rows)
        return STEP_S * (1 + self._row_share * size + 1e-6 * length)

    def now(self) -> float:
        return 0.0

    def prefill(self, plan: Plan) -> States:
        return States(torch.zeros(len(plan), 1))

    def draw(self, ready: Ready) -> None:
        self._drawn += [DrawnToken(s, self.known[s][s.length], 0.0) for s, _ in ready]

    def end_step(self) -> "Known":
        drawn, self._drawn = self._drawn, []
        return Known(drawn)

    def forget(self, samples: Sequence[Sample]) -> None:
        pass

    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        pass

    def copy_carries(self, sources: list[int], targets: list[int]) -> None:
        assert not sources, "no model, and no carries"

    def clear_pages(self, pages: list[int]) -> None:
        pass

    def clear(self) -> None:
        pass


class Known:
    def __init__(self, drawn: list[DrawnToken]) -> None:
        self._drawn = drawn

    def wait(self) -> Iterator[DrawnToken]:
        return iter(self._drawn)


def play(
    groups: Sequence[Group], places: int, most: int, row_share: float
) -> tuple[list[dict[str, Any]], list[list[float]]]:
    """Draw all answers at two visits, so many at once: the counts of each visit, and the seconds
    that planning took at each of its steps.
    """
    runner, stats = Streams(row_share), EngineStats()
    executor = PipelinedExecutor(runner, lambda: runner, stats)
    pages = 1 + max(len(p) + max(map(len, a)) for p, a in groups) // PAGE
    drafter = Drafter(most, executor) if most else None
    allocator = PageAllocator(pages * places * 2 + 100, PAGE)
    scheduler = Scheduler(
        allocator, executor, places, 4096, stats, AnswerLengths(), drafter, executor.patience
    )
    counts, seconds = list[dict[str, Any]](), list[list[float]]()
    for visit in range(2):
        scheduler.add(samples_of(groups, visit, pages, runner))
        its, decoded, device_s = list[float](), 0, 0.0
        before = stats.drafted_tokens, stats.accepted_tokens
        while not scheduler.is_done:
            began = perf_counter()
            waits = executor.is_pending and scheduler.wants_tokens
            planning = perf_counter() - began
            if waits:
                executor.settle()
                began = perf_counter()
                scheduler.remove_finished()
                planning += perf_counter() - began
            if scheduler.is_done:
                its.append(planning)
                break
            began = perf_counter()
            plan = scheduler.plan()
            planning += perf_counter() - began
            rows = [(one, count) for one, count in plan if isinstance(one, Sample)]
            decoded += len(rows)
            longest = max((one.length for one, _ in rows), default=0)
            device_s += runner.step_seconds(sum(count for _, count in rows), longest)
            device_s += executor.wait_s * waits
            computed = executor.forward(plan)
            assert computed is not None
            if plan:
                scheduler.advance(plan)
            ready = [one for chunk in computed for one in take_ready(*chunk)]
            executor.draw([*ready, *scheduler.start()])
            began = perf_counter()
            scheduler.remove_finished()
            its.append(planning + perf_counter() - began)
        executor.settle()
        scheduler.remove_finished()
        for sample in scheduler.take_finished():
            assert sample.tokens == runner.known.pop(sample), "guesses change what is drawn"
        drafted, accepted = stats.drafted_tokens - before[0], stats.accepted_tokens - before[1]
        row = {"steps": len(its), "decoded": decoded, "device_s": device_s}
        counts.append(row | {"drafted": drafted, "accepted": accepted})
        seconds.append(its)
    return counts, seconds


def samples_of(
    groups: Sequence[Group], visit: int, pages: int, runner: Streams
) -> Iterator[Sample]:
    """The answers of a visit: at the second, another half of each group."""
    for place, (prompt, answers) in enumerate(groups):
        half = len(answers) // 2
        its = answers[visit * half : (visit + 1) * half]
        request = Request(
            Prompt(f"prompt {place}", "", tuple(prompt)), visit, half, SamplingParams(10**6)
        )
        shared = SharedPrompt(request, pages)
        for index, answer in enumerate(its):
            sample = Sample(shared, index, 0, len(prompt) + len(answer), pages, None)
            runner.known[sample] = [*prompt, *answer]
            yield sample


# ------------------------------------------------------------------------------------- streams


def worked_answers(groups: int) -> list[Group]:
    """Sums of several numbers, worked step by step: siblings choose between ways of saying a step,
    and now and then make a mistake, from which on their numbers are others.
    """
    chance, words = Random(1), dict[str, int]()  # noqa: S311 (no secret)
    ways = (
        "First , add {a} and {b} : {a} + {b} = {c} .",
        "{a} plus {b} is {c} , so the sum so far is {c} .",
        "Now we take {a} and add {b} to it , which gives {c} .",
    )

    def ids(text: str) -> list[int]:
        """Words, and digits one by one."""
        parts = [p for word in text.split() for p in (word if word.isdigit() else [word])]
        return [words.setdefault(part, 100 + len(words)) for part in parts]

    made: list[Group] = []
    for _ in range(groups):
        numbers = [chance.randrange(11, 999) for _ in range(7)]
        prompt = ids(f"What is {' + '.join(map(str, numbers))} ? Let us think step by step .")
        answers: list[list[int]] = []
        for _ in range(2 * SIBLINGS):
            so_far, text = numbers[0], "Let us solve it ."
            favourite = chance.randrange(3)
            for number in numbers[1:]:
                total = so_far + number + (chance.random() < 0.08) * chance.choice((1, 10, -10))
                way = ways[favourite if chance.random() < 0.8 else chance.randrange(3)]
                text += " " + way.format(a=so_far, b=number, c=total)
                so_far = total
            answers.append(ids(f"{text} The answer is {so_far} . <end>"))
        made.append((prompt, answers))
    return made


def zipf(groups: int, length: int = 150, vocab: int = 49152) -> list[Group]:
    """Tokens drawn by their rank alone."""
    chance = Random(2)  # noqa: S311 (no secret)
    weights = [1 / rank for rank in range(1, vocab + 1)]

    def ids(count: int) -> list[int]:
        return chance.choices(range(vocab), weights, k=count)

    return [(ids(40), [ids(length) for _ in range(2 * SIBLINGS)]) for _ in range(groups)]


def recorded(path: Path) -> list[Group]:
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [(row["prompt"], row["answers"]) for row in rows]


def serve(options: argparse.Namespace) -> None:
    """Play what the lines of standard input ask for, and print what it took."""
    for line in sys.stdin:
        name, places, most = json.loads(line)
        count = max(3, 3 * places // SIBLINGS)
        groups = worked_answers(count)
        if name == "zipf":
            groups = zipf(count)
        elif name == "recorded":
            groups = recorded(options.streams)
        made = play(groups, places, most, COSTLY if name == "costly" else ROW_SHARE)
        print(json.dumps(made), flush=True)


class Tree:
    """A process that plays with the package of one tree."""

    def __init__(self, source: Path) -> None:
        self._process = subprocess.Popen(  # noqa: S603 (this benchmark)
            [sys.executable, "-m", "benchmarks.drafts", "--serve", *sys.argv[1:]],
            env=os.environ | {"PYTHONPATH": str(source.resolve())},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def play(self, *case: Any) -> Any:
        streams = self._process.stdin, self._process.stdout
        assert streams[0] is not None
        assert streams[1] is not None
        print(json.dumps(case), file=streams[0], flush=True)
        return json.loads(streams[1].readline())


def compare(options: argparse.Namespace) -> None:
    """Rows of this tree, and beside them of another; they take turns."""
    sources = {"": Path(__file__).resolve().parents[1] / "src"}
    sources |= {"old_": options.against} if options.against else {}
    trees = {name: Tree(source) for name, source in sources.items()}
    names = ["answers", "zipf", "costly"] + ["recorded"] * (options.streams is not None)
    for places, stream in product(options.sequences, names):
        runs: dict[tuple[str, int], list[Any]] = {}
        for _, (name, tree), most in product(range(options.repeats), trees.items(), (0, MOST)):
            runs.setdefault((name, most), []).append(tree.play(stream, places, most))
        for visit in range(2):
            row: dict[str, Any] = {"stream": stream, "sequences": places, "visit": visit}
            costs = dict[str, float]()
            for name in trees:
                off, on = (best_of(runs[name, most], visit) for most in (0, MOST))
                costs[name] = on["plan_us"] - off["plan_us"]
                row |= {f"{name}off_us": off["plan_us"], f"{name}guesses_us": costs[name]}
                row |= {f"{name}off_steps": off["steps"], f"{name}steps": on["steps"]}
                row |= {f"{name}{what}": on[what] for what in ("drafted", "accepted")}
                row[f"{name}device"] = off["device_s"] / on["device_s"]
            if options.against:
                row["cheaper"] = costs["old_"] / costs[""]
            rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}
            print(json_text(rounded), flush=True)


def best_of(runs: Sequence[Any], visit: int) -> dict[str, Any]:
    """The figures of a visit, with the least time of each of its steps: other processes disturb."""
    counts, seconds = [one[0][visit] for one in runs], [one[1][visit] for one in runs]
    assert all(one == counts[0] for one in counts)
    least_s = sum(map(min, zip(*seconds, strict=True)))
    return counts[0] | {"plan_us": 1e6 * least_s / counts[0]["decoded"]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--against", type=Path, metavar="SRC")
    parser.add_argument("--streams", type=Path, metavar="FILE.jsonl")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 16, 32, 60])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    (serve if asked.serve else compare)(asked)
