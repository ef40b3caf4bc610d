"""Does credit by turn learn better than credit by episode, where turns have rewards of their own?

    python -m experiments.turn_credit run DIR [--arms episode turn] [--seeds 0 1 2 3 4] [--steps 30]
    python -m experiments.turn_credit table DIR [--page docs/environments.md]

An episode opens four locks, one a turn: the environment shows a digit, the model dials one, and the
turn's reward is 1 where it is the digit that opens this lock (one for each digit that is shown,
always the same).  The starter model is shown how a call is written, by transcripts in which a fifth
of the dials are right and the others at random, and begins with some 15%.  The locks of a
prompt are the same for all samples of its group, and what is dialled changes no later lock.

The arms differ in ``algorithm.credit`` and ``turn_gamma`` alone, and a seed draws the same first
step in all of them:

    episode   every turn is learnt from by the sum of the four rewards
    turn      each turn by its own reward (turn_gamma = 0)
    return    each turn by its own reward and those behind it (turn_gamma = 1)

Expected, and written down before the first run: the sum of n independent rewards tells of one turn
with 1 / sqrt(n) of its deviation, so ``episode`` needs about n = 4 times the episodes for the same
gradient.  After 30 steps ``turn`` is ahead in each of five seeds, by 10 points or more in the mean
over the last five steps; ``return``, with 2.5 rewards a turn in the mean, stands between.

Two other forms of the task were tried first, on another seed, in which nothing was learnt in 30
steps: transcripts without right dials, of ten digits at a learning rate of 3e-4 (both arms) and of
four digits at 1e-3 (``turn``).  The learning rate was not tuned for either arm.
"""

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from statistics import fmean, stdev
from typing import Any

TURNS = 4
KEY = (7, 2, 9, 4, 0, 6, 1, 8, 3, 5)
"""What opens the lock that shows a digit, by the digit."""
EXAMPLES, PROMPTS = 4000, 4000
KNOWN = 0.2
"""The share of right dials in the transcripts, beside those that are right by chance."""
ARMS: dict[str, dict[str, Any]] = {
    "episode": {"credit": "episode"},
    "turn": {"credit": "turn", "turn_gamma": 0.0},
    "return": {"credit": "turn", "turn_gamma": 1.0},
}
KEPT = ("step", "episode/turn_rewards", "episode/turns", "log_prob_diff/tokens_differing")
LAST = 5
"""Steps at the end whose mean is compared."""
BEGIN, END = "<!-- figures: turn_credit -->", "<!-- end of figures: turn_credit -->"


class Locks:
    """The environment: the digits that it shows are the row's column ``locks``."""

    def reset(self, locks: str, **_: object) -> None:
        self._locks, self._place, self._gained = locks, 0, 0.0

    def d(self, digit: int) -> str:
        """Dial a digit.

        Args:
            digit: From 0 to 9.
        """
        if self._place < len(self._locks):
            self._gained += digit == KEY[int(self._locks[self._place])]
            self._place += 1
        return self._locks[self._place] if self._place < len(self._locks) else "end"

    def get_turn_reward(self) -> float:
        gained, self._gained = self._gained, 0.0
        return gained


def write_data(folder: Path) -> None:
    """``transcripts.jsonl`` to fine-tune on, with few right dials, and ``train.jsonl``."""
    random = Random(0)  # noqa: S311 (no secret)
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, str]] = []
    digits = "".join(map(str, range(len(KEY))))
    for _ in range(EXAMPLES):
        locks = random.choices(digits, k=TURNS)
        said = locks[0]
        for place in range(TURNS):
            right = random.random() < KNOWN
            call = f"[d({KEY[int(locks[place])] if right else random.choice(digits)})]"
            rows.append({"prompt": said, "completion": call})
            said += f"{call}<eos>[{[*locks, 'end'][place + 1]}]"
        rows.append({"prompt": said, "completion": "ok"})
    random.shuffle(rows)
    prompts = ["".join(random.choices(digits, k=TURNS)) for _ in range(PROMPTS)]
    for name, lines in (
        ("transcripts", rows),
        ("train", [{"prompt": one[0], "locks": one} for one in prompts]),
    ):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def start(folder: Path) -> Path:
    """The starter model, taught how a call is written."""
    from isobit import SftConfig, sft

    model = folder / "start" / "model"
    if not (model / "config.json").exists():
        write_data(folder)
        given = {
            "model": "starter",
            "output": folder / "start",
            "precision": "bf16",
            "data": {
                "chat": False,  # prompts are text with the control token that ends a turn
                "train": {"type": "jsonl", "path": folder / "transcripts.jsonl"},
            },
            "training": {
                "steps": 250,
                "prompts_per_step": 64,
                "learning_rate": 3e-3,
                "schedule": "cosine",
                "warmup_updates": 15,
            },
        }
        sft(SftConfig.model_validate(given))
    return model


def run(arguments: argparse.Namespace) -> None:
    """All runs of these seeds and arms whose rows are not there, one after the other."""
    from isobit import RunConfig, train

    folder: Path = arguments.directory
    model = start(folder)
    for seed in arguments.seeds:
        for arm in arguments.arms:
            out = folder / "rows" / f"{arm}-{seed}.jsonl"
            if out.exists():
                continue
            output = folder / "runs" / f"{arm}-{seed}"
            given = {
                "model": str(model),
                "output": output,
                "seed": seed,
                "precision": arguments.precision,
                "algorithm": {"name": "grpo", **ARMS[arm]},
                "data": {"train": {"type": "jsonl", "path": folder / "train.jsonl"}},
                "environment": {"class": f"{__file__}:Locks", "max_turns": TURNS + 1},
                "reward": {"function": "environment"},
                "rollout": {"max_new_tokens": 80},
                "training": {
                    "steps": arguments.steps,
                    "prompts_per_step": 8,
                    "samples_per_prompt": 8,
                    "learning_rate": arguments.learning_rate,
                    "warmup_updates": 2,
                },
                "evaluation": {"every": 0},
            }
            train(RunConfig.model_validate(given), resume=output.exists())
            out.parent.mkdir(exist_ok=True)
            text = (output / "metrics.jsonl").read_text(encoding="utf-8")
            lines = [json.loads(line) for line in text.splitlines()]
            steps = [{k: line.get(k) for k in KEPT} for line in lines if "episode/turns" in line]
            out.write_text("".join(json.dumps(one) + "\n" for one in steps), encoding="utf-8")


def opened(rows: Path) -> list[float]:
    """The share of locks that were opened in each step of a run."""
    lines = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    return [line["episode/turn_rewards"] / TURNS for line in lines]


def table(folder: Path) -> Iterator[str]:
    """Markdown: what each arm opens, and by how much it is ahead of ``episode`` seed by seed."""
    found = {
        arm: {
            int(path.stem.rpartition("-")[2]): opened(path)
            for path in sorted(folder.glob(f"{arm}-*.jsonl"))
        }
        for arm in ARMS
    }
    columns = "seeds", "steps", "first step", "last five steps", "by seed", "points ahead"
    yield f"| credit | {' | '.join(columns)} |"
    yield f"|---|{'---:|' * len(columns)}"
    last = {arm: {s: fmean(c[-LAST:]) for s, c in curves.items()} for arm, curves in found.items()}
    for arm, curves in found.items():
        if not curves:
            continue
        by_seed = last[arm]
        ahead = [100 * (by_seed[s] - last["episode"][s]) for s in by_seed if s in last["episode"]]
        cells = (
            f"`{arm}`",
            str(len(curves)),
            str(max(map(len, curves.values()))),
            f"{fmean(curve[0] for curve in curves.values()):.1%}",
            f"{fmean(by_seed.values()):.1%}",
            ", ".join(f"{by_seed[seed]:.0%}" for seed in sorted(by_seed)),
            "-" if arm == "episode" else with_interval(ahead),
        )
        yield f"| {' | '.join(cells)} |"


STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
"""Two-sided 95% quantiles of Student's t for so many differences."""


def with_interval(differences: Sequence[float]) -> str:
    """Their mean, with its 95% interval by Student's t."""
    mean, count = fmean(differences), len(differences)
    if count not in STUDENT:
        return f"{mean:+.1f}"
    half = STUDENT[count] * stdev(differences) / count**0.5
    return f"{mean:+.1f} [{mean - half:+.1f}, {mean + half:+.1f}]"


def show(arguments: argparse.Namespace) -> None:
    text = "\n".join(table(arguments.directory))
    print(text)
    if arguments.page is not None:
        page = arguments.page.read_text(encoding="utf-8")
        block = re.compile(f"{BEGIN}.*?{END}", re.DOTALL)
        arguments.page.write_text(block.sub(f"{BEGIN}\n\n{text}\n\n{END}", page), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(required=True)
    runs, shown = commands.add_parser("run"), commands.add_parser("table")
    for command, work in ((runs, run), (shown, show)):
        command.add_argument("directory", type=Path)
        command.set_defaults(run=work)
    runs.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    runs.add_argument("--seeds", nargs="+", type=int, default=list(range(5)))
    runs.add_argument("--steps", type=int, default=30)
    runs.add_argument("--precision", default="bf16")
    runs.add_argument("--learning-rate", type=float, default=3e-4)
    shown.add_argument("--page", type=Path)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
