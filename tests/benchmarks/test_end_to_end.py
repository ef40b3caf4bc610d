"""``benchmarks.end_to_end``: a small step of ours and of transformers on a CPU, vLLM's calls to
a double, and the table's arithmetic.
"""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from isobit.models.config import ModelConfig

SETTINGS = {"recompute": "mlp", "tokens_per_microbatch": 64}

ROOT = Path(__file__).parents[2]


@pytest.fixture
def parts() -> SimpleNamespace:
    return SimpleNamespace(
        **{
            name: import_module(f"benchmarks.rl_steps.{name}")
            for name in ("cases", "native", "rollout_peer", "training_peer")
        }
    )


@pytest.mark.parametrize("mode", ["bf16", "fp8"])
def test_our_step_is_exact_and_has_every_phase_but_a_second_forward(
    mode: str, parts: Any, tiny: ModelConfig
) -> None:
    case = parts.cases.Case(prompts=2, samples=3, prompt_tokens=5, new_tokens=24)
    loop = parts.native.Loop(mode, tiny, SETTINGS, longest=case.length, device="cpu")
    first, second = loop.time(case), loop.time(case)
    for row in (first, second):
        assert row["phases_s"].keys() == {
            "rollout",
            "forward",
            "backward",
            "optimiser",
            "publish",
            "other",
        }
        assert sum(row["phases_s"].values()) == pytest.approx(row["seconds"])
        assert (row["tokens_compared"], row["tokens_differing"]) == (2 * 3 * 24, 0)
        assert row["weight_bytes_changed"] > 0.005
        assert row["stats"]["generated_tokens"] == 2 * 3 * 24
    assert loop._trainer.updates == 4, "a warm-up and a timed update each"


@pytest.mark.parametrize("place", ["resident", "offload"])
def test_a_reference_model_is_another_phase(place: str, parts: Any, tiny: ModelConfig) -> None:
    case = parts.cases.Case(prompts=2, samples=3, prompt_tokens=5, new_tokens=24)
    loop = parts.native.Loop("fp8", tiny, SETTINGS, case.length, device="cpu", reference=place)
    row = loop.time(case)
    assert row["phases_s"]["reference"] > 0
    assert (row["tokens_compared"], row["tokens_differing"]) == (2 * 3 * 24, 0)


@pytest.mark.parametrize(
    ("tokens", "sizes"),
    [(64, {2, 1}), (100, {3, 1}), (87, {3, 1}), (145, {5, 2}), (10, {1}), (1000, {7})],
)
def test_our_warm_up_has_every_size_of_micro_batch(
    tokens: int, sizes: set[int], parts: Any, tiny: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = parts.cases.Case(prompts=1, samples=7, prompt_tokens=5, new_tokens=24)
    loop = parts.native.Loop(
        "bf16",
        tiny,
        SETTINGS | {"tokens_per_microbatch": tokens},
        longest=case.length,
        device="cpu",
    )
    seen: list[set[int]] = []
    update = loop._trainer.update

    def watched(batches: Any, *rest: Any, **more: Any) -> Any:
        seen.append({len(batch.lengths) for batch in batches})
        return update(batches, *rest, **more)

    monkeypatch.setattr(loop._trainer, "update", watched)
    loop.time(case)
    warm, timed = seen
    assert warm == timed == sizes


def test_our_warm_up_decodes_at_both_ends_of_a_sequence(
    parts: Any, tiny: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = parts.cases.Case(prompts=2, samples=3, prompt_tokens=5, new_tokens=24)
    loop = parts.native.Loop("bf16", tiny, SETTINGS, longest=case.length, device="cpu")
    asked: list[tuple[set[int], int, int]] = []
    generate = parts.native.generate_shared

    def watched(world: Any, engine: Any, requests: Any) -> Any:
        prompts, counts = (
            {len(one.prompt.token_ids) for one in requests},
            sum(one.samples for one in requests),
        )
        asked.append((prompts, counts, requests[0].sampling.max_new_tokens))
        return generate(world, engine, requests)

    monkeypatch.setattr(parts.native, "generate_shared", watched)
    loop.time(case)
    assert asked == [({5}, 6, 16), ({13}, 6, 16), ({5}, 6, 24)], (
        "the second warm-up ends where the timed rollout does"
    )


def test_the_peers_training_phase(
    parts: Any, tiny: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts.training_peer, "SETTINGS", {"none": (4, 1), "full": (2,)})
    trainer = parts.training_peer.PeerTrainer(tiny, "cpu")
    before = [master.detach().clone() for master in trainer._optimiser._masters]
    tried = trainer._try

    def scarce(case: Any, size: int, recompute: str) -> Any:
        if size == 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return tried(case, size, recompute) | ({"tokens_per_s": 1e9} if recompute == "full" else {})

    monkeypatch.setattr(trainer, "_try", scarce)
    case = parts.cases.Case(prompts=2, samples=3, prompt_tokens=5, new_tokens=24)
    row = trainer.time(case, None)
    assert row["phases_s"].keys() == {
        "old_log_probs",
        "forward",
        "backward",
        "optimiser",
        "publish",
        "other",
    }
    assert (row["recompute"], row["tokens_per_microbatch"], row["sequences_measured"]) == (
        "full",
        58,
        6,
    )
    assert [one.get("error") for one in row["tried"]] == ["out of memory", None, None]
    assert any(
        not torch.equal(a, b) for a, b in zip(before, trainer._optimiser._masters, strict=True)
    )
    assert trainer.time(case, 3)["sequences_measured"] == 4, "whole micro-batches"


@pytest.mark.parametrize(("sequences", "rest"), [(None, 2), (8, 2), (3, 1)])
def test_nothing_in_the_peers_timed_step_happens_for_the_first_time(
    sequences: int | None, rest: int, parts: Any, tiny: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = parts.training_peer
    # one size of micro-batches: which of several is the fastest depends on the machine
    monkeypatch.setattr(module, "SETTINGS", {"none": (2,), "full": (2,)})
    monkeypatch.setattr(module, "FORWARD_TOKENS", 100)
    trainer, done = module.PeerTrainer(tiny, "cpu"), list[Any]()
    forward, start, step = trainer._peer.log_probs, trainer._phases.start, trainer._optimiser.step

    def watched(ids: torch.Tensor, first: int = 0) -> torch.Tensor:
        done.append(
            (
                tuple(ids.shape),
                torch.is_grad_enabled(),
                trainer._peer.model.is_gradient_checkpointing,
            )
        )
        return forward(ids, first)

    monkeypatch.setattr(trainer._peer, "log_probs", watched)
    monkeypatch.setattr(trainer._phases, "start", lambda: (done.append("start"), start()))
    monkeypatch.setattr(
        trainer._optimiser, "step", lambda phases: (done.append("step"), step(phases))
    )
    monkeypatch.setattr(module, "free_memory", lambda: done.append("free"))
    trainer.time(parts.cases.Case(prompts=2, samples=4, prompt_tokens=5, new_tokens=24), sequences)
    began = len(done) - done[::-1].index("start")
    freed = began - done[began - 1 :: -1].index("free")
    warm, timed = done[freed : began - 1], done[began:]
    assert set(timed) == set(warm) and "free" not in timed, (
        "memory that was given back would have to be mapped again"
    )
    sizes = {shape[0] for shape, gradients, _ in timed[:-1] if not gradients}
    assert sizes == {3, rest}, (
        "3 sequences of 29 tokens in a forward, and what is left of the batch"
    )


def test_the_peers_ratio_starts_at_one_and_the_gradient_is_that_of_log_p(
    parts: Any, tiny: ModelConfig
) -> None:
    trainer = parts.training_peer.PeerTrainer(tiny, "cpu")
    case = parts.cases.Case(prompts=1, samples=2, prompt_tokens=5, new_tokens=24)
    batch, peer = trainer._batch(case, 2), trainer._peer
    found = []
    for old in (None, trainer._old_log_probs(batch)):
        trainer._gradients(batch, old, 2, "none")
        found.append([parameter.grad.float() for parameter in peer.model.parameters()])
        peer.model.zero_grad()
    log_probs = peer.log_probs(batch.ids, 4).view(2, 24)
    assert torch.allclose(
        log_probs,
        peer.model(batch.ids)
        .logits.float()
        .log_softmax(-1)[:, 4:-1]
        .gather(2, batch.ids[:, 5:, None])[..., 0],
    )
    (-(log_probs * batch.advantages[:, None]).sum() / 48).backward()
    exact = [parameter.grad.float() for parameter in peer.model.parameters()]
    for gradients in found:
        assert all(
            torch.allclose(a, b, rtol=0.05, atol=1e-5)
            for a, b in zip(gradients, exact, strict=True)
        )


class Llm:
    """Answers with as many tokens as are asked for."""

    def __init__(self, folder: str, **arguments: Any) -> None:
        assert json.loads((Path(folder) / "config.json").read_text())["model_type"] == "qwen3"
        assert arguments["enable_prefix_caching"] and arguments["max_model_len"] == 8448
        self.calls: list[tuple[int, int, int]] = []

    def reset_prefix_cache(self) -> bool:
        self.calls.append((0, 0, 0))
        return True

    def generate(self, prompts: list[Any], sampling: Any, use_tqdm: bool) -> list[Any]:
        self.calls.append((len(prompts), sampling.n, sampling.max_tokens))
        answer = SimpleNamespace(token_ids=[0] * sampling.max_tokens)
        return [SimpleNamespace(outputs=[answer] * sampling.n) for _ in prompts]


def test_vllm_is_asked_for_every_sample_of_every_prompt(
    parts: Any, card: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Llm] = []
    vllm = ModuleType("vllm")
    vllm.__dict__.update(
        __version__="0",
        SamplingParams=SimpleNamespace,
        LLM=lambda *a, **k: made.append(Llm(*a, **k)) or made[-1],
    )
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setattr(parts.rollout_peer, "measure_card", lambda: card)
    monkeypatch.setattr(parts.rollout_peer, "card_memory_gib", lambda: 1.0)
    parts.rollout_peer.run_rollouts("qwen3-8b", ["2k", "8k"], tmp_path)
    assert made[0].calls == [
        (0, 0, 0),
        (32, 8, 16),
        (0, 0, 0),
        (32, 8, 2048),
        (0, 0, 0),
        (8, 8, 16),
        (0, 0, 0),
        (8, 8, 8192),
    ]
    rows = [
        json.loads(line)
        for line in (tmp_path / "vllm-bf16-qwen3-8b.jsonl").read_text().splitlines()
    ]
    assert [(row["part"], row["case"]) for row in rows] == [("rollout", "2k"), ("rollout", "8k")]


def test_a_rollout_whose_prompts_vllm_still_has_is_not_timed(
    parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setattr(sys.modules["vllm"], "SamplingParams", SimpleNamespace, raising=False)
    llm = SimpleNamespace(
        reset_prefix_cache=lambda: False, generate=lambda *_, **__: pytest.fail("it was asked")
    )
    with pytest.raises(AssertionError, match="vLLM would find the prompts"):
        parts.rollout_peer.generate(llm, [[1]], parts.cases.Case(1, 1, 1, 4), 4)


FP8_SETTING = {"recompute": "none", "tokens_per_microbatch": 6912}
PEER_SETTING = {"recompute": "none", "tokens_per_microbatch": 4608}


def row(
    engine: str,
    mode: str,
    part: str,
    phases: dict[str, float],
    uuid: str = "A",
    case: str = "2k",
    **other: Any,
) -> dict[str, Any]:
    place = {"shape": "qwen3-8b", "case": case, "card": {"uuid": uuid}, "kind": "rl", "part": part}
    return (
        {"engine": engine, "mode": mode, "phases_s": phases, "seconds": sum(phases.values())}
        | place
        | other
    )


def ours(mode: str, rollout: float, backward: float, **other: Any) -> dict[str, Any]:
    counts = {
        "tokens_compared": 524288,
        "tokens_differing": 0,
        "weight_bytes_changed": 0.031,
        "memory": {"training": {"peak_gib": 120.0}},
    }
    phases = {
        "rollout": rollout,
        "forward": 10.0,
        "backward": backward,
        "optimiser": 0.5,
        "publish": 0.1,
        "other": 0.4,
    }
    return row("native", mode, "whole", phases, **FP8_SETTING | counts | other)


def table(folder: Path, rows: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    (folder / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    command = [sys.executable, "-m", "benchmarks.end_to_end", "table", folder]
    done = subprocess.run(
        command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((folder / "end-to-end-table.json").read_text())


def test_the_outside_line_is_the_sum_of_two_commands_on_one_card(tmp_path: Path) -> None:
    training = {
        "old_log_probs": 20.0,
        "forward": 20.0,
        "backward": 55.0,
        "optimiser": 0.8,
        "publish": 0.2,
    }
    rows = [ours("fp8", 35.0, 29.0), ours("bf16", 45.0, 39.0)]
    rows += [
        row("vllm", "bf16", "rollout", {"rollout": 64.0}),
        row("transformers", "bf16", "training", training, **PEER_SETTING),
    ]
    shown, lines = table(tmp_path, rows)
    assert (
        "| 2k | vLLM BF16 + transformers BF16 | none 4,608 | 64.0 | 20.0 | 20.0 | 55.0 | 0.8 | 0.2 "
        "| 0.0 | 96.0 | 160.0 | 1.00 |" in shown
    )
    fp8 = (
        "| 2k | isobit `fp8` | none 6,912 | 35.0 | - | 10.0 | 29.0 | 0.5 | 0.1 | 0.4 | 40.0 | "
        "75.0 | 2.40 | 1.25 | 2.13 |"
    )
    assert f"{fp8} 0 of 524,288 | 3.1% | 120 |" in shown
    assert len(lines) == 3


def test_the_outside_line_says_what_part_of_the_batch_was_measured(tmp_path: Path) -> None:
    training = row(
        "transformers", "bf16", "training", {"forward": 9.0}, sequences_measured=32, **PEER_SETTING
    )
    rollout = row("vllm", "bf16", "rollout", {"rollout": 64.0})
    shown, _ = table(tmp_path, [rollout, training])
    assert (
        "| 2k | vLLM BF16 + transformers BF16 (training scaled from 32 of 256 sequences) | none "
        "4,608 | 64.0 |" in shown
    )
    shown, _ = table(tmp_path, [rollout, training | {"sequences_measured": 256}])
    assert "| 2k | vLLM BF16 + transformers BF16 | none 4,608 | 64.0 |" in shown
    shown, _ = table(tmp_path, [training])
    assert (
        "| 2k | transformers BF16, training alone (training scaled from 32 of 256 sequences) | "
        "none 4,608 | - |" in shown
    )


def test_halves_of_two_cards_are_not_added_up(tmp_path: Path) -> None:
    rows = [ours("fp8", 35.0, 29.0), row("vllm", "bf16", "rollout", {"rollout": 64.0}, uuid="B")]
    rows += [
        row("transformers", "bf16", "training", {"old_log_probs": 20.0, "forward": 76.0}),
        ours("bf16", 0.0, 0.0, uuid="C") | {"error": "refused"},
    ]
    shown, lines = table(tmp_path, rows)
    assert all(line["training_x_outside"] is None for line in lines)
    assert (
        "| 2k | vllm BF16, rollout alone | - | 64.0 | - | - | - | - | - | 0.0 | - | 64.0 | - | - | "
        "- | - | - | - |" in shown
    )
    assert "| 2k | isobit `bf16` | refused |" in shown
