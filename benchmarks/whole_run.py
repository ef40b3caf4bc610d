"""Some steps of ``isobit train`` on a model of random weights, from a folder of shards: with LoRA
or all weights, what a step takes of the card and of the host.

    python -m benchmarks.whole_run --shape llama-3.1-70b --format fp8 --lora-rank 16 [--steps 3]
        [--precision fp8] [--prompts 32] [--samples 8] [--prompt-tokens 256] [--new-tokens 512]
        [--microbatch 8192] [--kv-memory-gib 12] [--folder DIR] [--keep DIR] [--out FILE.jsonl]
        [--seconds S] [--steps-out FILE.jsonl] [-- --KEY VALUE ...]
    python -m benchmarks.whole_run --shape qwen3-8b --precision int8 --steps 200 --prompts 4
        --samples 8 --prompt-tokens 32 --new-tokens 480 --kv-memory-gib 6 --seconds 1500
        --steps-out FILE.jsonl
    python -m benchmarks.whole_run --table FILE.jsonl[.xz]    # how long runs began and ended

The folder is written first where none is there (``benchmarks.loading``), with a tokenizer of one
word for each row of the head, so that no sample ends early but by its stop token; a folder that is
there has its own shape. The reward is luck. A JSON line: what was asked, the card, seconds from the
start of the process to the first step and in all, how many steps were done, of each what ``STEP``
names, log-probabilities that were compared and that differ, and the host's anonymous memory at its
highest (what no file backs, looked at every 20 ms).

A long run leaves a line of each step in ``--steps-out`` as soon as it is done, with the seconds and
the sums up to it, and every tenth is printed. After ``--seconds``, or when this process is told to
end (SIGTERM), the run is told so, and the row is of the steps that were done.
"""

import argparse
import json
import lzma
import math
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter, sleep
from typing import Any

from benchmarks.common import append_row, around_dashes, card_row, markdown, printed
from benchmarks.engines import COLUMNS
from benchmarks.loading import write_folder
from isobit.models.config import ModelConfig
from isobit.models.folder import describe_model
from isobit.models.safetensors import SHARD_BYTES
from isobit.models.shapes import model_shape
from isobit.records.text import Completion, Prompt
from isobit.store.journals import whole_lines

STEP = (
    *("time/rollout_s", "time/training_s", "tokens_per_s/rollout", "tokens_per_s/training"),
    *("memory/rollout_peak_gib", "memory/training_peak_gib", "response_length/mean"),
    *("log_prob_diff/tokens_compared", "log_prob_diff/tokens_differing", "grad_norm"),
    *(name for name, _ in COLUMNS.values()),  # of flows and engines that are not exact
)


def luck(prompt: Prompt, completion: Completion) -> float:
    """0 or 1, by the tokens."""
    return float(sum(completion.token_ids) % 2)


def write_tokenizer(config: ModelConfig, folder: Path) -> None:
    """A word for each row of the head: ``<end>``, which ends a sample, ``<unknown>``, ``w2``, .."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split

    end, unknown = "<end>", "<unknown>"
    words = {f"w{row}": row for row in range(2, config.vocab_size)} | {end: 0, unknown: 1}
    made = Tokenizer(WordLevel(words, unk_token=unknown))
    split = Split(Regex(r"w\d+"), "isolated")
    made.pre_tokenizer = split  # pyright: ignore[reportAttributeAccessIssue]
    made.save(str(folder / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "unk_token": unknown,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described), encoding="utf-8")


def write_prompts(config: ModelConfig, tokens: int, path: Path) -> None:
    numbers = Random(0)  # noqa: S311 (no secret)
    lines = [
        "".join(f"w{numbers.randrange(2, config.vocab_size)}" for _ in range(tokens))
        for _ in range(1024)
    ]
    text = "".join(json.dumps({"prompt": line}) + "\n" for line in lines)
    path.write_text(text, encoding="utf-8")


def recipe_of(options: argparse.Namespace, folder: Path, directory: Path) -> dict[str, Any]:
    """The keys of the run."""
    return {
        "model": folder,
        "output": directory / "run",
        "precision": options.precision,
        "data.train.type": "jsonl",
        "data.train.path": directory / "prompts.jsonl",
        "data.max_prompt_tokens": options.prompt_tokens,
        "reward.function": f"{__file__}:luck",
        "rollout.max_new_tokens": options.new_tokens,
        "rollout.max_sequences": options.max_sequences,
        **({"rollout.kv_memory_gib": options.kv_memory_gib} if options.kv_memory_gib else {}),
        "training.steps": options.steps,
        "training.prompts_per_step": options.prompts,
        "training.samples_per_prompt": options.samples,
        "training.tokens_per_microbatch": options.microbatch,
        "training.recompute": options.recompute,
        "training.moments": "bf16",
        "training.learning_rate": "1e-6",
        "checkpoint.every": 0,
        "checkpoint.keep_last": 0,
        "device": options.device,
        **({"lora.rank": options.lora_rank} if options.lora_rank else {}),
    }


_STOPPED = 128 + signal.SIGTERM, -signal.SIGTERM
"""How ``isobit train`` ends that was told to, once, or a second time by whoever ended this process
and all of its group.
"""


def run(
    recipe: dict[str, Any],
    more: list[str],
    log: Path,
    done: Callable[[dict[str, Any]], None] = lambda step: None,
    is_over: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Train in a process of its own, until all steps are done or ``is_over``; ``done`` is given
    each step. Raises RuntimeError with the log's end where it fails.
    """
    empty = log.with_suffix(".toml")
    empty.write_text("", encoding="utf-8")
    words = [word for key, value in recipe.items() for word in (f"--{key}", str(value))]
    steps, peak, is_stopped = Steps(Path(recipe["output"]) / "metrics.jsonl"), 0, False
    with log.open("wb") as said:
        command = [sys.executable, "-m", "isobit.cli.main", "train", str(empty), *words, *more]
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)  # noqa: S603
        while process.poll() is None:
            now = anonymous_bytes_of(process.pid)
            peak = max(peak, now)
            for step in steps.new(now):
                done(step)
            if not is_stopped and is_over():
                process.send_signal(signal.SIGTERM)
                is_stopped = True
            sleep(0.02)
    for step in steps.new(0):
        done(step)
    if process.returncode and not (is_stopped and process.returncode in _STOPPED):
        tail = log.read_text(encoding="utf-8", errors="replace")[-2000:]
        raise RuntimeError(f"isobit train ended with {process.returncode}:\n{tail}")
    last = steps.all[-1] if steps.all else {}
    return {
        "seconds_to_first_step": steps.all[0]["seconds"] if steps.all else None,
        "seconds": perf_counter() - steps.began,
        "host_anonymous_gib": peak / 2**30,
        "steps_done": len(steps.all),
        "compared": last.get("compared", 0),
        "differing": last.get("differing", 0),
        "by_step": [{name: step[name] for name in STEP if name in step} for step in steps.all],
    }


class Steps:
    """The steps of a run, as they come into its metrics.jsonl."""

    def __init__(self, metrics: Path) -> None:
        self.all: list[dict[str, Any]] = []
        self.began = perf_counter()
        self._metrics, self._position = metrics, 0

    def new(self, anonymous: int) -> Iterator[dict[str, Any]]:
        """Those that were done since the last call: ``STEP``, the seconds from the beginning, the
        sums over all steps so far, and the host's anonymous memory, of so many bytes now.
        """
        found = whole_lines(self._metrics, self._position)
        self._position += sum(map(len, found))
        for line in map(json.loads, found):
            if STEP[0] in line:
                step = {name: line[name] for name in STEP if name in line}
                last = self.all[-1] if self.all else {}
                sums = {
                    name: last.get(name, 0) + (step.get(f"log_prob_diff/tokens_{name}") or 0)
                    for name in ("compared", "differing")
                }
                seconds = perf_counter() - self.began
                now = {"host_anonymous_gib": anonymous / 2**30}
                self.all.append({"step": line["step"], "seconds": seconds, **sums, **now, **step})
                yield self.all[-1]


def anonymous_bytes_of(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:  # it has ended
        return 0
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")]
    return found[0] if found else 0


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--format", default="bf16", choices=("bf16", "fp8"))
    parser.add_argument("--precision", default="fp8")
    parser.add_argument("--lora-rank", type=int, default=0, help="0: all weights learn")
    parser.add_argument("--recompute", default="full")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    sizes = {"steps": 3, "prompts": 32, "samples": 8, "prompt-tokens": 256, "new-tokens": 512}
    for name, value in {**sizes, "microbatch": 8192, "max-sequences": 256}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--kv-memory-gib", type=float, default=0.0, help="0: what is left")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--keep", type=Path, help="where the run's log and metrics stay")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=math.inf, help="of the run, then it ends")
    parser.add_argument("--steps-out", type=Path, help="a line of each step, as it is done")
    parser.add_argument(
        "--table", type=Path, metavar="ROWS", help="print rows of --out, run nothing"
    )
    return parser.parse_args(words)


def main(given: Sequence[str] | None = None) -> None:
    words = sys.argv[1:] if given is None else list(given)
    own, more = around_dashes(words)
    options = parse(own)
    if options.table is not None:
        print("\n".join(table(options.table)))
        return
    with tempfile.TemporaryDirectory(prefix="isobit-run-") as made:
        directory = options.keep or Path(made)
        directory.mkdir(parents=True, exist_ok=True)
        folder = options.folder or directory / options.shape
        began = perf_counter()
        if (folder / "config.json").is_file():
            config = describe_model(folder).config
        else:
            config = model_shape(options.shape)
            write_folder(config, folder, SHARD_BYTES, options.format)
            write_tokenizer(config, folder)
        written = perf_counter() - began
        write_prompts(config, options.prompt_tokens, directory / "prompts.jsonl")
        recipe = recipe_of(options, folder, directory)
        found = run(recipe, more, directory / "log", _keeper(options.steps_out), _until(options))
        folder_bytes = sum(one.stat().st_size for one in folder.glob("*.safetensors"))
    asked = {
        key: value
        for key, value in vars(options).items()
        if not isinstance(value, Path) and key not in ("seconds", "steps_out", "table")
    }
    where = card_row() if options.device == "cuda" else {"card": "cpu"}
    row = {**asked, **where, "folder_bytes": folder_bytes, "seconds_written": written, **found}
    printed(row)
    append_row(options.out, row)


_ENDS = 25
"""Steps at the beginning, behind the first, and at the end of a run that ``table`` compares."""


def table(path: Path) -> Iterator[str]:
    """The rows of a file as markdown: medians of a run's first and last steps, the first of all
    left out, which compiles and captures.
    """
    opened = lzma.open if path.suffix == ".xz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    columns = ["steps", "s in all", "rollout, s a step", "training, s a step", "peak GiB, rollout"]
    columns += ["peak GiB, training", "host GiB at most", "differing"]
    yield markdown(["", *columns])
    yield "|---|" + "---:|" * len(columns)
    for row in rows:
        steps = row["by_step"]
        first, last = steps[1 : 1 + _ENDS], steps[-_ENDS:]
        ends = [
            " -> ".join(_median(part, name, digits) for part in (first, last))
            for name, digits in zip(STEP[:2] + STEP[4:6], (2, 2, 1, 1), strict=True)
        ]
        cells = [f"`{row['precision']}`", str(row["steps_done"]), f"{row['seconds']:.0f}", *ends]
        differing = f"{row['differing']:,} of {row['compared']:,}"
        yield markdown([*cells, f"{row['host_anonymous_gib']:.1f}", differing])


def _median(steps: Sequence[Mapping[str, float]], name: str, digits: int) -> str:
    found = [step[name] for step in steps if name in step]
    return f"{median(found):.{digits}f}" if found else "-"


_SHOWN = 10
"""Steps from one printed line to the next."""


def _keeper(out: Path | None) -> Callable[[dict[str, Any]], None]:
    def keep(step: dict[str, Any]) -> None:
        append_row(out, step)
        if step["step"] % _SHOWN == 0:
            printed(step)

    return keep


def _until(options: argparse.Namespace) -> Callable[[], bool]:
    """Whether the run's seconds are over, or this process was told to end."""
    told = False

    def tell(*_: object) -> None:
        nonlocal told
        told = True

    signal.signal(signal.SIGTERM, tell)
    end = perf_counter() + options.seconds
    return lambda: told or perf_counter() >= end


if __name__ == "__main__":
    main()
