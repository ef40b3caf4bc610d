"""A run of random weights by several processes, which is killed behind a checkpoint and resumed by
as many or by others: whether the steps that are done again are the same, bit for bit.

    python -m benchmarks.kill_and_resume --shape qwen3-32b --processes 4 --resumed-by 4
        --directory DIR [--folder MODEL] [--layers 16] [--steps 3] [--seconds S] [--out FILE.jsonl]
        [-- --KEY VALUE ...]

The first run writes a checkpoint at the step before ``--steps``, and all of its processes are ended
by SIGKILL once that and the step behind it are done; the second resumes and is ended behind that
step.  The folder is written first where none is there (``benchmarks.loading``), with a tokenizer of
one word for each row of the head.  The reward is luck.  A JSON line: what was asked, the card, the
seconds of each run to its last step, whether the lines of that step in ``digests.jsonl`` (tokens,
log-probabilities, rewards, weights, masters, moments) are equal, and the log-probabilities that
were compared and that differ.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from benchmarks.common import append_row, around_dashes, card_row, printed
from benchmarks.loading import write_folder
from benchmarks.whole_run import write_prompts, write_tokenizer
from isobit.models.folder import describe_model
from isobit.models.safetensors import SHARD_BYTES
from isobit.models.shapes import model_shape
from isobit.store.directory import RunDirectory
from isobit.store.journals import whole_lines

_LUCK = Path(__file__).with_name("whole_run.py")


@dataclass(frozen=True, slots=True)
class Killed:
    """A run up to its SIGKILL."""

    seconds: float  # to the last step
    digest: Mapping[str, Any]  # the line of the last step
    compared: int  # log-probabilities, in all steps that this run did
    differing: int


def run_until(words: Sequence[str], output: Path, step: int, log: Path, until: float) -> Killed:
    """Train until a step is done and the checkpoint before it is on the disk, and kill all
    processes. Raises RuntimeError with the log's end where the run ends before, or at ``until``.
    """
    run, began = RunDirectory(output), perf_counter()
    digests, metrics = output / "digests.jsonl", output / "metrics.jsonl"
    position = metrics.stat().st_size if metrics.exists() else 0
    before = len(_lines(digests, step))
    checkpoint = run.checkpoints / f"step_{step - 1:06}"
    with log.open("ab") as said:
        command = [sys.executable, "-m", "isobit.cli.main", "train", *words]
        process = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)  # noqa: S603
        try:
            while not (checkpoint.is_dir() and len(_lines(digests, step)) > before):
                if process.poll() is not None or perf_counter() > until:
                    tail = log.read_text(encoding="utf-8", errors="replace")[-3000:]
                    raise RuntimeError(f"the run got no further (it has {process.poll()}):\n{tail}")
                # a resumed run has cut the lines behind its checkpoint off
                before = min(before, len(_lines(digests, step)))
                sleep(0.05)
            seconds = perf_counter() - began
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found = [json.loads(line) for line in whole_lines(metrics, min(position, _size(metrics)))]
    sums = [
        sum(int(line.get(f"log_prob_diff/tokens_{name}") or 0) for line in found)
        for name in ("compared", "differing")
    ]
    return Killed(seconds, _lines(digests, step)[-1], *sums)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _lines(digests: Path, step: int) -> list[dict[str, Any]]:
    """Of one step."""
    if not digests.exists():
        return []
    return [one for one in map(json.loads, whole_lines(digests, 0)) if one["step"] == step]


def recipe_of(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The keys of both runs."""
    directory = options.directory
    return {
        "model": folder,
        "output": directory / "run",
        "precision": options.precision,
        "data.train.type": "jsonl",
        "data.train.path": directory / "prompts.jsonl",
        "data.max_prompt_tokens": options.prompt_tokens,
        "reward.function": f"{_LUCK}:luck",
        "rollout.max_new_tokens": options.new_tokens,
        "rollout.max_batched_tokens": 2048,
        "training.steps": options.steps + 1,  # behind the last, a run writes its model
        "training.prompts_per_step": options.prompts,
        "training.samples_per_prompt": options.samples,
        "training.tokens_per_microbatch": options.microbatch,
        "training.recompute": "full",
        "training.moments": options.moments,
        "training.learning_rate": "1e-6",
        "checkpoint.every": options.steps - 1,
        "checkpoint.keep_last": 1,
        "device": options.device,
        **({"rollout.kv_memory_gib": options.kv_memory_gib} if options.kv_memory_gib else {}),
    }


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--layers", type=int, default=0, help="of the shape; 0: all")
    parser.add_argument("--precision", default="fp8")
    parser.add_argument("--moments", default="fp8", choices=("fp32", "bf16", "fp8"))
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    sizes = {"processes": 4, "resumed-by": 4, "steps": 3, "prompts": 8, "samples": 4}
    more = {"prompt-tokens": 64, "new-tokens": 192, "microbatch": 1024}
    for name, value in {**sizes, **more}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--kv-memory-gib", type=float, default=0.0, help="0: what is left")
    parser.add_argument("--seconds", type=float, default=3600.0, help="of both runs together")
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--folder", type=Path, help="of the model; by default below DIRECTORY")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(words)


def main(given: Sequence[str] | None = None) -> None:
    words = sys.argv[1:] if given is None else list(given)
    own, more = around_dashes(words)
    options = parse(own)
    directory, until = options.directory, perf_counter() + options.seconds
    folder = options.folder or directory / "model"
    directory.mkdir(parents=True, exist_ok=True)
    began = perf_counter()
    if (folder / "config.json").is_file():
        config = describe_model(folder).config
    else:
        config = model_shape(options.shape)
        if options.layers:
            config = replace(config, num_layers=options.layers)
        write_folder(config, folder, SHARD_BYTES)
        write_tokenizer(config, folder)
    written = perf_counter() - began
    write_prompts(config, options.prompt_tokens, directory / "prompts.jsonl")
    recipe = directory / "run.toml"
    recipe.write_text("", encoding="utf-8")
    keys = [
        word
        for key, value in recipe_of(options, folder).items()
        for word in (f"--{key}", str(value))
    ]
    killed = [
        run_until(
            [str(recipe), *how, *keys, "--cluster.processes", str(processes), *more],
            directory / "run",
            options.steps,
            directory / "log",
            until,
        )
        for processes, how in ((options.processes, ()), (options.resumed_by, ("--resume",)))
    ]
    asked = {key: value for key, value in vars(options).items() if not isinstance(value, Path)}
    row = {
        **asked,
        **(card_row() if options.device == "cuda" else {"card": "cpu"}),
        "seconds_written": written,
        "seconds_to_last_step": [one.seconds for one in killed],
        "equal": killed[0].digest == killed[1].digest,
        "digest": killed[1].digest,
        "compared": sum(one.compared for one in killed),
        "differing": sum(one.differing for one in killed),
    }
    printed(row)
    append_row(options.out, row)


if __name__ == "__main__":
    main()
