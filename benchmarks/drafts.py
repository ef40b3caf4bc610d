"""What guesses cost the host (``isobit.rollout.drafts``), and how many are accepted: known streams
of tokens through the scheduler and the executor of a card, without a card or a model.

    python -m benchmarks.drafts [--against OLDER/src] [--streams FILE.jsonl] > ROWS.jsonl
    python -m benchmarks.drafts --clock [--against OLDER/src] > ROWS.jsonl

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

``--clock`` asks what guesses cost where estimates are wrong: steps take what those of a trained
443M model were measured to take, by a simulated clock from which the drafter learns, and a step
that is waited for takes longer by each of ``COSTS``, while the drafter is told steps of each of
``ESTIMATES`` times their length. ``bursts`` are phrases that come again between numbers that do
not. A row has by how many times a rollout is faster with guesses: the least and the mean of four
rollouts, one after the other, for each cost and estimate. All samples of a rollout begin together,
and it lasts until the last one ends.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, product
from pathlib import Path
from random import Random
from statistics import harmonic_mean
from time import perf_counter
from typing import Any

import numpy
import torch

from benchmarks.common import printed
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

SIBLINGS, MOST, PAGE = 8, 7, 64
STEP_S, ROW_SHARE, COSTLY = 3.6e-3, 0.004, 50.0
"""About Qwen3-8B's on an H200, and the share that each row adds."""
SIZES = graph_sizes(128)
MEASURED_S = ((1, 1.04e-3), (8, 1.29e-3), (32, 1.40e-3), (64, 1.78e-3))
"""Seconds of a decode step by rows: 443M in INT8 on an H200."""
COSTS = ((0.05e-3, 2e-6), (0.25e-3, 20e-6), (0.6e-3, 50e-6))
"""Seconds that a step takes longer, and that each of its samples adds, where it is waited for."""
CAPTURE_S = 0.03
"""What capturing and measuring a step takes, by estimate: of a model of 135M two rollouts that met
new sizes took 52 and 92 ms longer on an H200.
"""
ESTIMATES = (0.6, 1.0, 1.5)
ROLLOUTS, LONGEST = 4, 200

Group = tuple[list[int], list[list[int]]]
"""A prompt and its answers."""


class Streams:
    """A ``PipelineRunner`` that draws what is known."""

    version, page_tokens, seconds, captures = 0, PAGE, 0.0, 0

    def __init__(self, row_share: float = ROW_SHARE) -> None:
        self._row_share, self._drawn = row_share, list[DrawnToken]()
        self.known: dict[Sample, list[int]] = {}

    def decode(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            known, first = self.known[sample], sample.length
            for place in range(first, first + 1 + len(sample.draft)):
                token = known[place] if place < len(known) else 0
                self._drawn.append(DrawnToken(sample, token, 0.0))

    def step_seconds(self, rows: int, length: int) -> float:
        return self.estimate(rows, length)

    def estimate(self, rows: int, length: int) -> float:
        is_costly = self._row_share > ROW_SHARE
        size = rows if is_costly else next(size for size in SIZES if size >= rows)
        return STEP_S * (1 + self._row_share * size + 1e-6 * length)

    def now(self) -> float:
        return self.seconds

    @property
    def steps_s(self) -> float:
        """Seconds of the clock that passed outside of captures."""
        return self.seconds - CAPTURE_S * self.captures

    def pass_by(self, rows: int, samples: int, is_waited_for: bool) -> None:
        """Let the time of a step pass, if there is a clock."""

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


class Clocked(Streams):
    """Its clock says what steps take, and an estimate of that may be wrong."""

    def __init__(self, estimate: float, cost: tuple[float, float]) -> None:
        super().__init__()
        self._estimate, self._cost, self._noise = estimate, cost, Random(1)  # noqa: S311 (no secret)
        self.seconds = 1.0
        self._captured = set[tuple[int, bool]]()

    def _capture(self, rows: int, verifies: bool) -> None:
        key = next(size for size in SIZES if size >= rows), verifies
        if key not in self._captured:
            self._captured.add(key)
            self.captures += 1
            self.seconds += CAPTURE_S

    def step_seconds(self, rows: int, length: int) -> float:
        self._capture(rows, verifies=True)
        return self.estimate(rows, length)

    def estimate(self, rows: int, length: int) -> float:
        return self._estimate * _measured_s(rows)

    def pass_by(self, rows: int, samples: int, is_waited_for: bool) -> None:
        if rows:
            self._capture(rows, verifies=rows > samples)
            self.seconds += _measured_s(rows) * self._noise.gauss(1.0, 0.03)
        if is_waited_for:
            self.seconds += self._cost[0] + self._cost[1] * samples


def _measured_s(rows: int) -> float:
    size = next(size for size in SIZES if size >= rows)
    rows_of, seconds_of = zip(*MEASURED_S, strict=True)
    return float(numpy.interp(size, rows_of, seconds_of))


class Known:
    def __init__(self, drawn: list[DrawnToken]) -> None:
        self._drawn = drawn

    def wait(self) -> Iterator[DrawnToken]:
        return iter(self._drawn)


def play(
    rollouts: Sequence[Sequence[Group]], places: int, most: int, runner: Streams
) -> tuple[list[dict[str, Any]], list[list[float]]]:
    """Draw all answers of each rollout at two visits, so many at once: the counts of each visit,
    and the seconds that planning took at each of its steps.
    """
    stats = EngineStats()
    executor = PipelinedExecutor(runner, lambda: runner, stats)
    drafter = Drafter(most, executor) if most else None
    groups = [group for its in rollouts for group in its]
    pages = 1 + max(len(p) + max(map(len, a)) for p, a in groups) // PAGE
    allocator = PageAllocator(pages * places * 2 + 100, PAGE)
    scheduler = Scheduler(
        allocator, executor, places, 4096, stats, AnswerLengths(), drafter, executor.patience
    )
    counts, seconds = list[dict[str, Any]](), list[list[float]]()
    for rollout, visit in product(range(len(rollouts)), range(2)):
        scheduler.add(samples_of(rollouts[rollout], rollout, visit, pages, runner))
        its, decoded, device_s = list[float](), 0, 0.0
        before, began_at = (stats.drafted_tokens, stats.accepted_tokens), runner.steps_s
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
            num_rows = sum(count for _, count in rows)
            device_s += runner.estimate(num_rows, longest)
            device_s += executor.wait_s * waits
            is_waited_for = waits or any(one.draft for one, _ in rows)
            runner.pass_by(num_rows, len(rows), is_waited_for)
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
        row["clock_s"] = runner.steps_s - began_at
        counts.append(row | {"drafted": drafted, "accepted": accepted})
        seconds.append(its)
    return counts, seconds


def samples_of(
    groups: Sequence[Group], rollout: int, visit: int, pages: int, runner: Streams
) -> Iterator[Sample]:
    """The answers of a visit: at the second, another half of each group."""
    for place, (prompt, answers) in enumerate(groups):
        half = len(answers) // 2
        its = answers[visit * half : (visit + 1) * half]
        request = Request(
            Prompt(f"prompt {rollout}/{place}", "", tuple(prompt)),
            visit, half, SamplingParams(10**6),
        )  # fmt: skip
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


def bursts(groups: int) -> list[Group]:
    chance = Random(3)  # noqa: S311 (no secret)

    def ids(fewest: int, most: int) -> list[int]:
        return [chance.randrange(1000, 1100) for _ in range(chance.randint(fewest, most))]

    made: list[Group] = []
    for _ in range(groups):
        phrases, answers = [ids(3, 6) for _ in range(6)], list[list[int]]()
        for _ in range(2 * SIBLINGS):
            parts = (
                [*chance.choice(phrases), *(chance.randrange(10) for _ in range(count))]
                for count in chance.choices(range(1, 6), k=LONGEST)
            )
            answers.append([*chain.from_iterable(parts)])
        made.append((ids(40, 40), answers))
    return made


def recorded(path: Path) -> list[Group]:
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [(row["prompt"], row["answers"]) for row in rows]


def serve(options: argparse.Namespace) -> None:
    """Play what the lines of standard input ask for, and print what it took."""
    for line in sys.stdin:
        name, places, most, *clock = json.loads(line)
        if clock:
            groups = STREAMS[name](ROLLOUTS * max(1, places // SIBLINGS))
            made = play(rollouts_of(groups, places), places, most, Clocked(*clock))
            print(json.dumps(made), flush=True)
            continue
        count = max(3, 3 * places // SIBLINGS)
        groups = worked_answers(count)
        if name == "zipf":
            groups = zipf(count)
        elif name == "recorded":
            groups = recorded(options.streams)
        made = play([groups], places, most, Streams(COSTLY if name == "costly" else ROW_SHARE))
        print(json.dumps(made), flush=True)


STREAMS: dict[str, Callable[[int], list[Group]]] = {
    "answers": worked_answers, "zipf": zipf, "bursts": bursts,
}  # fmt: skip


def rollouts_of(groups: Sequence[Group], places: int) -> list[list[Group]]:
    """Rollouts of as many samples as there are places, whose answers are cut."""
    half = min(SIBLINGS, places)
    cut = [
        (prompt, [answer[:LONGEST] for answer in [*answers[:half], *answers[-half:]]])
        for prompt, answers in groups
    ]
    each = len(cut) // ROLLOUTS
    return [cut[n * each : (n + 1) * each] for n in range(ROLLOUTS)]


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


def trees_of(options: argparse.Namespace) -> dict[str, Tree]:
    """This tree, and another one beside it."""
    sources = {"": Path(__file__).resolve().parents[1] / "src"}
    sources |= {"old_": options.against} if options.against else {}
    return {name: Tree(source) for name, source in sources.items()}


def by_clock(options: argparse.Namespace) -> None:
    trees = trees_of(options)
    for places, stream in product(options.sequences, STREAMS):
        faster: dict[tuple[str, int], list[float]] = {}
        for cost, estimate, (name, tree) in product(COSTS, ESTIMATES, trees.items()):
            off, on = (tree.play(stream, places, n, estimate, cost)[0] for n in (0, MOST))
            for place, (a, b) in enumerate(zip(off, on, strict=True)):
                faster.setdefault((name, place % 2), []).append(a["clock_s"] / b["clock_s"])
        for visit in range(2):
            row: dict[str, Any] = {"stream": stream, "sequences": places, "visit": visit}
            for name in trees:
                its = faster[name, visit]
                row |= {f"{name}least": min(its), f"{name}mean": harmonic_mean(its)}
            printed({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()})


def compare(options: argparse.Namespace) -> None:
    """Rows of this tree, and beside them of another; they take turns."""
    trees = trees_of(options)
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
            printed(rounded)


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
    parser.add_argument("--clock", action="store_true", help="what guesses cost, by that of a card")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 16, 32, 60])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    (serve if asked.serve else by_clock if asked.clock else compare)(asked)
