"""Perplexity of the repository's docs, by Isobit in each precision and by transformers."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.pretrained.results import write_result
from isobit.config.tables import PrecisionConfig
from isobit.data.tokenizer import load_tokenizer
from isobit.models.folder import load_policy
from isobit.models.policy import Policy
from isobit.models.scorer import Scorer
from isobit.records.batch import lay_end_to_end
from isobit.records.sequence import TokenSequence

DOCS = Path(__file__).parents[2] / "docs"


def windows_of_docs(folder: Path, windows: int, length: int) -> list[tuple[int, ...]]:
    """The first windows of ``length`` tokens of the pages of docs/, end to end by name."""
    text = "\n\n".join(page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("*.md")))
    ids = load_tokenizer(folder).encode(text[: 8 * windows * length], add_special_tokens=False)
    assert len(ids) >= windows * length, "docs/ has fewer tokens"
    return [tuple(ids[i * length : (i + 1) * length]) for i in range(windows)]


def ours(policy: Policy, windows: Sequence[tuple[int, ...]]) -> float:
    """exp(mean -log p) of all tokens but the first of each window."""
    total = 0.0
    for window in windows:
        sequence = TokenSequence.of_answer(window[:1], window[1:])
        scores = Scorer(policy).score(lay_end_to_end([sequence]))
        total -= float(scores.log_probs.double().sum())
    return math.exp(total / sum(len(window) - 1 for window in windows))


@torch.no_grad()
def of_transformers(
    folder: Path, windows: Sequence[tuple[int, ...]], dtype: torch.dtype, device: str
) -> float:
    """The same by transformers in ``dtype``; log-softmax in FP32."""
    read: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model = torch.nn.Module.to(read, device)
    total = 0.0
    for window in windows:
        ids = torch.tensor([window], device=device)
        log_probs = model(ids).logits[0, :-1].float().log_softmax(-1)
        total -= float(log_probs.gather(1, ids[0, 1:, None]).double().sum())
    return math.exp(total / sum(len(window) - 1 for window in windows))


def linear_formats(policy: Policy) -> dict[str, int]:
    """How many linears multiply in each format while sampling."""
    return dict(
        Counter(site.forward for site in policy.flow.rollout.sites if site.kind == "linear")
    )


def run(
    folder: Path,
    flows: Mapping[str, PrecisionConfig],
    windows: int,
    length: int,
    device: str,
    out: Path,
) -> None:
    """Print a line a model, and write all of them after each."""
    texts = windows_of_docs(folder, windows, length)
    found: dict[str, float] = {}
    formats: dict[str, dict[str, int]] = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        found[f"transformers {name}"] = of_transformers(folder, texts, dtype, device)
        print(f"transformers {name}: {found[f'transformers {name}']:.4f}", flush=True)
    result: dict[str, Any] = {"device": device, "windows": windows, "length": length}
    for name, precision in flows.items():
        policy = load_policy(folder, precision, device, trainable=False)
        found[name], formats[name] = ours(policy, texts), linear_formats(policy)
        ratio = found[name] / found["transformers bf16"]
        print(f"{name}: {found[name]:.4f}, {ratio:.4f} of transformers' BF16", flush=True)
        write_result(
            out, f"perplexity-{device}", result | {"perplexity": found, "linears": formats}
        )
