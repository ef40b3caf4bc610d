"""The card of an exported folder."""

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from isobit.config.precision import PrecisionConfig
from isobit.models.config import Lora, ModelConfig
from isobit.models.decoder import build_decoder
from isobit.observe.model_card import CardFacts, Merge, model_card
from isobit.observe.run_record import read_run
from isobit.precision.flow import build_flow
from isobit.run.loop import train

CONFIG = ModelConfig("qwen3", 64, 128, 128, 2, 4, 4, 32, 128, 1e-6, 1e4, False)
DECODER = build_decoder(CONFIG).shape
FACTS = CardFacts(
    "mine", "starter", CONFIG, None, None, (), {"a.safetensors": "0" * 64}, None, None
)


def front_matter(card: str) -> dict[str, Any]:
    match = re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)
    assert match is not None
    return yaml.safe_load(match[1])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three steps with evaluations before, in the middle and at the end."""
    config = {
        "model": "org/name@main",
        "data": {
            "train": {"type": "jsonl", "path": "sums.jsonl"},
            "eval": {"held|out": {"type": "jsonl", "path": "`x`.jsonl"}},
        },
        "reward": {"function": "rewards.py:right"},
        "algorithm": {"name": "grpo"},
        "training": {"steps": 3, "learning_rate": 1e-6},
        "precision": {"preset": "fp8"},
    }
    (tmp_path / "run.json").write_text(json.dumps({"config": config}))
    rows = [
        {"step": 0, "eval/held|out/accuracy": 0.25}
        | {"eval/held|out/low": 0.2, "eval/held|out/high": 0.3},
        {"step": 1, "log_prob_diff/tokens_compared": 1000, "log_prob_diff/tokens_differing": 0},
        {"step": 2, "log_prob_diff/tokens_compared": 500, "log_prob_diff/tokens_differing": 2},
        {"step": 2, "eval/held|out/accuracy": 0.5},
        {"step": 3, "log_prob_diff/tokens_compared": 7, "log_prob_diff/tokens_differing": 7},
        {"step": 3, "eval/held|out/accuracy": 0.75},
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def test_the_figures_are_those_up_to_the_step(run: Path) -> None:
    card = model_card(replace(FACTS, record=read_run(run), step=2))
    assert "25.0% (95%: 20.0 to 30.0) | 50.0% | 2 |" in card
    assert "Of 1,500 log-probabilities recorded while sampling, 2 differed" in card
    assert "reinforcement learning after 2 steps" in card
    assert front_matter(card) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": "org/name",
        "tags": ["isobit", "reinforcement-learning"],
        "model-index": [
            {
                "name": "mine",
                "results": [
                    {
                        "task": {"type": "text-generation"},
                        "dataset": {
                            "name": "held\N{BROKEN BAR}out",
                            "type": "held\N{BROKEN BAR}out",
                        },
                        "metrics": [{"type": "accuracy", "value": 0.5}],
                    }
                ],
            }
        ],
    }
    for text in (
        "`sums.jsonl`",
        "`rewards.py:right`",
        "`grpo`",
        "learning_rate 1e-06",
        "| `fp8` |",
    ):
        assert text in card, text
    end = model_card(replace(FACTS, record=read_run(run), step=3))
    assert "75.0% | 3 |" in end and "Of 1,507 log-probabilities" in end


def test_a_mean_reward_is_no_accuracy_in_the_index_either(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('\n{"step": 3, "eval/held|out/accuracy": 0.4, "eval/held|out/right": 0.1}')
    card = model_card(replace(FACTS, record=read_run(run), step=3))
    (result,) = front_matter(card)["model-index"][0]["results"]
    assert result["metrics"] == [{"type": "mean_reward", "value": 0.4}]
    assert "held\N{BROKEN BAR}out mean reward" in card


def test_names_cannot_break_a_table_or_be_markup(run: Path) -> None:
    card = model_card(replace(FACTS, name="<script>*x*\n# Hello", record=read_run(run), step=3))
    assert front_matter(card)["model-index"][0]["name"] == "<script>*x* # Hello"
    card = card.split("---\n", 2)[2]
    assert "<script>" not in card.replace("\\<script\\>", "")
    assert not re.search(r"^# Hello", card, re.MULTILINE)
    assert "held\N{BROKEN BAR}out" in card and "held|out" not in card
    tables = re.findall(r"(?:^\|.*\|$\n?)+", card, re.MULTILINE)
    assert len(tables) == 3
    for table in tables:
        assert len({line.count("|") for line in table.strip().splitlines()}) == 1, table


def test_fp8_and_what_is_not_whole_are_explained() -> None:
    flow = build_flow(PrecisionConfig(preset="fp8"), build_decoder(CONFIG).shape)
    card = model_card(replace(FACTS, in_8_bits="fp8", flow=flow, not_whole=("a", "b")))
    assert "weight_scale_inv" in card and "2 matrices have sizes" in card
    assert "fp8: one function in rollout and training" in card
    assert front_matter(card)["tags"] == ["isobit", "fp8"]
    assert "the bytes that Isobit samples with" in card
    other = model_card(replace(FACTS, in_8_bits="fp8", flow=flow, sampled_in="int8"))
    assert "quantised anew, since the run sampled in the flow int8" in other
    assert "samples with" not in other
    assert "from `model`" in model_card(replace(FACTS, source="/home/somebody/model"))
    plain = model_card(FACTS)
    assert "## Formats" not in plain and "base_model" not in front_matter(plain)
    assert front_matter(model_card(replace(FACTS, source="org/it@v1")))["base_model"] == "org/it"


def set_config(run: Path, **tables: Any) -> None:
    manifest = json.loads((run / "run.json").read_text())
    manifest["config"] |= tables
    (run / "run.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("reward", "cell"),
    [
        ({"function": "a.py:f", "weight": 1.0, "parts": {}}, "`a.py:f`"),
        ({"function": "a.py:f", "weight": 0.5}, "`a.py:f`, weight 0.5"),
        ({"function": "reasoning_gym", "model": "org/rm"}, "`org/rm`"),
        (
            {
                "function": "reasoning_gym",  # the default, which never ran
                "parts": {
                    "accuracy": {"function": "math_verify", "weight": 1.0},
                    "short": {"function": "/home/me/b.py:f", "weight": -0.1},
                },
            },
            "accuracy (`math_verify`), weight 1, short (`b.py:f`), weight -0.1",
        ),
    ],
)
def test_the_rewards_are_those_that_ran_with_their_weights(
    reward: dict[str, Any], cell: str, run: Path
) -> None:
    set_config(run, reward=reward)
    card = model_card(replace(FACTS, record=read_run(run), step=3))
    assert f"| reward | {cell} |" in card


def test_licence_and_data_are_named_where_they_are_known(run: Path, tmp_path: Path) -> None:
    gsm8k = {"type": "hub", "dataset": "openai/gsm8k", "path": None}
    mixed = {"a": gsm8k, "b": {"type": "jsonl", "path": "x.jsonl"}}
    set_config(run, data={"train": mixed, "eval": {"gsm8k": gsm8k}}, model="/home/me/there")
    start = tmp_path / "start"
    start.mkdir()
    facts = replace(FACTS, record=read_run(run), step=3, start=start)
    assert front_matter(model_card(facts))["datasets"] == ["openai/gsm8k"]
    assert not {"license", "base_model"} & front_matter(model_card(facts)).keys()
    (start / "README.md").write_text("---\nlicense: mit\nbase_model: org/base\n---\nA model.\n")
    found = front_matter(model_card(facts))
    assert (found["license"], found["base_model"]) == ("mit", "org/base")
    (start / "README.md").write_text("---\n{not: [yaml\n---\n")
    assert "license" not in front_matter(model_card(facts))


def test_a_run_leaves_its_card_beside_its_model(make_config: Any) -> None:
    config = make_config(model="starter")
    train(config)
    card = (config.output / "model" / "README.md").read_text()
    front = front_matter(card)
    assert front["license"] == "apache-2.0"
    assert front["model-index"][0]["name"] == "starter-isobit"
    assert "reinforcement learning after 2 steps" in card
    assert "`isobit.starter.tasks:correct_answer`" in card
    digest = hashlib.sha256((config.output / "model/model.safetensors").read_bytes()).hexdigest()
    assert f"| `model.safetensors` | `{digest}` |" in card


ADAPTERS = replace(CONFIG, lora=Lora(4, 8.0, ("q_proj", "v_proj")))


def test_the_card_of_adapters_is_pefts(run: Path, tmp_path: Path) -> None:
    start = tmp_path / "models--org--name/snapshots/0123"
    start.mkdir(parents=True)
    (start / "README.md").write_text("---\nlicense: mit\nbase_model: org/older\n---\nA model.\n")
    facts = replace(FACTS, config=ADAPTERS, record=read_run(run), step=3, start=start)
    card = model_card(facts)
    front = front_matter(card)
    assert (front["library_name"], front["base_model"], front["license"]) == (
        "peft", "org/name", "mit",
    )  # fmt: skip
    assert front["tags"] == ["isobit", "lora", "transformers", "reinforcement-learning"]
    numbers = 2 * 4 * (128 + 128 + 128 + 128)
    assert (
        f"LoRA adapters of rank 4 (alpha 8; q_proj, v_proj), {numbers:,} parameters in FP32, for "
        "the qwen3 language model `org/name`: the model of a run"
    ) in card
    assert 'PeftModel.from_pretrained(base, "FOLDER")' in card
    assert 'base = AutoModelForCausalLM.from_pretrained("org/name")' in card
    local = model_card(replace(facts, start=tmp_path / "my models"))
    assert "base_model" not in front_matter(local)
    assert "model `./my models`: the" in local and 'from_pretrained("BASE")' in local


@pytest.mark.parametrize("format", [None, "fp8", "int8"])
def test_the_card_of_merged_adapters_says_that_its_figures_are_of_another_function(
    format: Any, run: Path
) -> None:
    flow = None if format is None else build_flow(PrecisionConfig(preset=format), DECODER)
    assert ADAPTERS.lora is not None
    facts = replace(FACTS, in_8_bits=format, flow=flow, merge=Merge(ADAPTERS.lora, 3.671))
    card = model_card(replace(facts, record=read_run(run), step=3))
    assert "with LoRA adapters of rank 4 (alpha 8; q_proj, v_proj) merged into it" in card
    assert "another function than the one that was trained" in card
    assert "Rounding moved them by 367.1% (rms) of what the adapters change" in card
    warned = card.index("These figures are not of the weights in this folder")
    assert warned < card.index("75.0% | 3 |") and warned < card.index("Of 1,507 log-prob")
    assert "in the flow `fp8`" in card
    assert "model-index" not in front_matter(card)
    assert "samples with" not in card
    assert ("quantised anew, from the merged matrices" in card) == (format is not None)
    alone = model_card(facts)
    assert "merged into it" in alone and "These figures" not in alone


def test_figures_of_a_run_in_another_flow_are_said_to_be(run: Path) -> None:
    facts = replace(FACTS, record=read_run(run), step=3, in_8_bits="int8", sampled_in="fp8")
    card = model_card(facts)
    assert "they are of the run's policy, in the flow `fp8`." in card
    assert "model-index" not in front_matter(card)


def test_no_place_of_this_machine_is_in_a_card(run: Path, tmp_path: Path) -> None:
    secret = "/home/somebody/secret"
    sources = {
        "a": {"type": "jsonl", "path": [f"{secret}/a.jsonl", f"{secret}/b.jsonl"]},
        "b": {"type": "csv", "path": "../somebody/secret/c.csv"},
        "c": {"type": "hf", "path": "~/somebody/secret/d"},
    }
    set_config(
        run,
        model=f"{secret}/model",
        data={"train": sources, "eval": {"held": sources["a"]}},
        reward={"function": f"{secret}/reward.py:right"},
    )
    for config in (CONFIG, ADAPTERS):
        facts = replace(FACTS, config=config, record=read_run(run), step=3)
        card = model_card(replace(facts, source=f"{secret}/x", start=Path(f"{secret}/model")))
        assert "somebody" not in card
        assert "a: `a.jsonl`, `b.jsonl`, b: `c.csv`, c: `d`" in card
        assert "`reward.py:right`" in card
