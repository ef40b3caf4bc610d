"""Build the starter model: ``python -m isobit.starter.build --out FOLDER``.

Pretrains a small Qwen3-shaped policy from random initialisation on the text of ``tasks.pretraining_answer``, with the trainer and the
supervised objective that Isobit itself offers, measures it with Isobit's engine, and writes a Hugging Face folder with its problems and
its model card.  The same arguments and number of threads give the same weights, bit for bit.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from transformers import PreTrainedTokenizerFast

from isobit.config.schema import PrecisionConfig, TrainingConfig
from isobit.models.checkpoint import save_policy
from isobit.models.config import ModelConfig
from isobit.models.policy import Policy, random_policy
from isobit.starter.card import model_card
from isobit.starter.figures import measure
from isobit.starter.tasks import Problem, pretraining_answer, problems, question
from isobit.starter.tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE, build_tokenizer
from isobit.training.supervised import SupervisedObjective, pack_pairs
from isobit.training.trainer import Trainer

MODEL = ModelConfig(
    family="qwen3",
    vocab_size=VOCAB_SIZE,
    hidden_size=128,
    intermediate_size=384,
    num_layers=4,
    num_heads=4,
    num_kv_heads=4,
    head_dim=32,
    max_positions=512,
    rms_epsilon=1e-6,
    rope_theta=10000.0,
    tied_embeddings=True,
)
PRECISION = PrecisionConfig(preset="bf16")
TRAINING = TrainingConfig(learning_rate=3e-3, schedule="cosine", warmup_steps=50, tokens_per_microbatch=4096)
REPORTS = 6
REPORT_PROBLEMS = 200


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """The arguments of the command line."""

    out: Path
    updates: int
    batch: int
    seed: int
    threads: int

    @property
    def command(self) -> str:
        """The command line that gives the same weights."""
        return f"python -m isobit.starter.build --updates {self.updates} --batch {self.batch} --seed {self.seed} --threads {self.threads}"


def build(options: BuildOptions) -> None:
    """Train, measure and write everything but the package's own modules into ``options.out``."""
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(MODEL.max_positions)
    write_problems(options.out)
    started = time.perf_counter()
    policy = pretrain(options, tokenizer)
    minutes = (time.perf_counter() - started) / 60
    save_policy(policy, options.out)
    save_tokenizer(tokenizer, options.out)
    figures = measure(policy, tokenizer, options.out / "held_out.jsonl")
    print(f"{minutes:.1f} minutes; {figures}")
    card = model_card(
        MODEL,
        sum(master.numel() for master in policy.parameters()),
        figures,
        command=options.command,
        updates=options.updates,
        batch=options.batch,
        preset=PRECISION.preset,
        minutes=minutes,
        threads=options.threads,
    )
    (options.out / "README.md").write_text(card, encoding="utf-8")


def pretrain(options: BuildOptions, tokenizer: PreTrainedTokenizerFast) -> Policy:
    """A policy taught from random initialisation; prints its figures a few times on the way."""
    policy = random_policy(MODEL, PRECISION, options.seed)
    trainer = Trainer(policy, TRAINING, options.updates)
    report_at = {options.updates * part // REPORTS for part in range(1, REPORTS)}
    for update, pairs in enumerate(training_pairs(options, tokenizer), start=1):
        metrics = trainer.update(pack_pairs(pairs, TRAINING.tokens_per_microbatch), SupervisedObjective())
        if update in report_at:
            print(f"update {update}/{options.updates}, loss {metrics.loss:.3f}: ", end="", flush=True)
            print(measure(policy, tokenizer, options.out / "held_out.jsonl", REPORT_PROBLEMS), flush=True)
    return policy


def training_pairs(options: BuildOptions, tokenizer: PreTrainedTokenizerFast) -> Iterator[list[tuple[list[int], list[int]]]]:
    """For each update, ``batch`` pairs (question's ids, answer's ids with the end of the sequence) of problems drawn anew."""
    random = Random(options.seed)  # noqa: S311 (draws a text, keeps no secret)
    train = problems(held_out=False)
    for _ in range(options.updates):
        yield [_pair(problem, random, tokenizer) for problem in random.sample(train, options.batch)]


def _pair(problem: Problem, random: Random, tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    answer = tokenizer(pretraining_answer(problem, random), add_special_tokens=False)["input_ids"]
    return tokenizer(question(problem))["input_ids"], [*answer, EOS_ID]


def write_problems(folder: Path) -> None:
    """``train.jsonl`` and ``held_out.jsonl``: a prompt and its answer a line."""
    for name, held_out in (("train", False), ("held_out", True)):
        rows = ({"prompt": question(problem), "answer": str(sum(problem))} for problem in problems(held_out))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """The tokenizer's files and ``generation_config.json``; the class is named as every release of transformers knows it."""
    tokenizer.save_pretrained(str(folder))
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    config.pop("backend", None)
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    generation = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")


def parse(arguments: Sequence[str] | None = None) -> BuildOptions:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m isobit.starter.build", description="Build the starter model.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model; files of the same names are replaced")
    parser.add_argument("--updates", type=int, default=700, help="optimiser steps (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=96, help="answers an update (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    return BuildOptions(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    build(parse())
