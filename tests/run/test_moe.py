"""A mixture of experts through the commands: fine-tuned from random weights, trained by
reinforcement learning in FP8, exact in its log-probabilities and its experts, and resumed.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from isobit.config.precision import Preset
from isobit.config.recipes import RunConfig, SftConfig
from isobit.models.config import Experts
from isobit.models.folder import read_config
from isobit.observe.report.page import write_report
from isobit.run.loop import train
from isobit.run.sft import sft
from isobit.training.comparison import UpdateMetrics
from isobit.training.trainer import Trainer
from tests.death import Death
from tests.tiny import json_lines as lines

SHAPE = {
    "family": "qwen3_moe",
    "hidden_size": 72,
    "intermediate_size": 48,
    "num_layers": 2,
    "num_heads": 2,
    "head_dim": 32,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "max_positions": 128,
}
FIRST_TOKEN = "return completion.token_ids[0] / 100"
"""A reward that differs within a group."""


@pytest.fixture(scope="module")
def moe_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of fine-tuning from random weights in FP8; its directory."""
    output = tmp_path_factory.mktemp("moe") / "sft"
    examples = {"type": "jsonl", "path": "starter:train.jsonl", "completion": "answer", "limit": 16}
    config = {
        "model": "starter",
        "output": output,
        "precision": "fp8",
        "threads": 1,
        "from_scratch": SHAPE,
        "data": {"train": examples},
        "training": {"steps": 2, "prompts_per_step": 4, "learning_rate": 1e-2, "router_z": 0.01},
    }
    sft(SftConfig.model_validate(config))
    return output


def test_fine_tuning_writes_a_mixture_and_its_routers_figures(moe_run: Path) -> None:
    assert read_config(moe_run / "model").experts == Experts(6, 2, 40, renormalise=True)
    for line in lines(moe_run / "metrics.jsonl"):
        assert 0.9 < line["router/balance"] < 6
        assert line["router/z"] > 0 <= line["router/idle"]
        assert 1 / 6 <= line["router/busiest"] <= 1


@pytest.mark.few(1)
@pytest.mark.parametrize("preset", ["fp8", "int8", "fp8-rollout"])
def test_reinforcement_learning_counts_the_experts_that_differ(
    preset: Preset,
    moe_run: Path,
    make_config: Callable[..., RunConfig],
    write_reward: Callable[[str], str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = make_config(
        reward=write_reward(FIRST_TOKEN),
        model=str(moe_run / "model"),
        precision=preset,
        training={"steps": 3, "learning_rate": 1e-2},
        data={"eval": {}},
    )
    summary = train(config)
    printed = capsys.readouterr().out
    steps = lines(config.output / "metrics.jsonl")
    assert len(steps) == 3
    assert summary.routings_compared == summary.tokens_compared > 0
    if preset in ("fp8", "int8"):
        assert summary.tokens_differing == summary.routings_differing == 0
        assert "  routings 0  " in printed
    else:
        assert summary.routings_differing > 0
        assert sum(line["routing_diff/tokens_differing"] for line in steps) == (
            summary.routings_differing
        )
    assert f"{summary.routings_differing} of {summary.routings_compared} routings" in printed
    first = lines(config.output / "completions.jsonl")[0]
    assert len(first["routings"]) == len(first["log_probs"])
    page = write_report(config.output).read_text(encoding="utf-8")
    assert "Differing routings" in page


@pytest.mark.exhaustive
def test_a_resumed_run_has_the_bytes_of_one_that_was_never_stopped(
    moe_run: Path,
    make_config: Callable[..., RunConfig],
    write_reward: Callable[[str], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With replay, whose sequences have no routing."""

    def configuration(name: str) -> RunConfig:
        return make_config(
            reward=write_reward(FIRST_TOKEN),
            model=str(moe_run / "model"),
            output=tmp_path / name,
            precision="fp8",
            training={"steps": 3, "learning_rate": 1e-2},
            data={"eval": {}},
            replay={"fraction": 0.5},
            checkpoint={"every": 1},
        )

    whole, cut = configuration("whole"), configuration("cut")
    train(whole)
    exact = Trainer.update

    def dies(self: Trainer, *arguments: Any) -> UpdateMetrics:
        if self.updates == 2:
            raise Death
        return exact(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "update", dies)
        with pytest.raises(Death):
            train(cut)
    train(cut, resume=True)
    expected, found = (
        load_file(one.output / "model" / "model.safetensors") for one in (whole, cut)
    )
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    for one in (whole, cut):
        assert json.loads((one.output / "summary.json").read_text())["routings_differing"] == 0
