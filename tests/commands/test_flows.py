"""Comparing precision flows of a model: the figures, the rule, and crests in front of INT8."""

import gc
import io
import json
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import rich.console
import torch

from isobit.api import generate
from isobit.cli.main import main
from isobit.commands import flows
from isobit.commands.flows import compare_flows
from isobit.config.precision import PrecisionConfig
from isobit.config.recipes import RunConfig
from isobit.models.config import Experts
from isobit.models.decoder import decoder_shape, layer_parameters
from isobit.models.folder import describe_model, load_model
from isobit.models.policy import Policy, random_policy
from isobit.models.scorer import Scorer
from isobit.models.shapes import model_shape
from isobit.observe import flow_choice
from isobit.observe.console import Console
from isobit.observe.evaluation import EvalResult
from isobit.observe.flow_choice import (
    Closeness,
    Comparison,
    Crest,
    FlowFigures,
    describe_comparison,
    describe_crests,
    differences_of,
    problems_needed,
    read_by_size,
    recommend,
)
from isobit.observe.intervals import paired_interval
from isobit.precision.flow import build_flow
from isobit.records.packing import pack
from isobit.records.sequence import TokenSequence
from isobit.run.crests import measure_crests, notice_crests
from isobit.run.loop import train
from isobit.starter import starter_folder
from isobit.util.errors import ConfigError, DataError
from tests.tiny import TINY, tiny_model

MakeConfig = Callable[..., RunConfig]


def presets(*names: str, **options: Any) -> list[PrecisionConfig]:
    return [PrecisionConfig.model_validate({"preset": name, **options}) for name in names]


def test_a_flow_is_measured_against_bf16_over_the_same_answers(
    make_config: MakeConfig, tiny_folder: Path
) -> None:
    found = compare_flows(tiny_folder, make_config(), presets("fp8"))
    assert [one.name for one in found.flows] == ["bf16", "fp8"]
    # the same by other means: the scorer's log-probabilities, and KL over the whole vocabulary
    answers = greedy_answers(tiny_folder)
    log_probs, logits = {}, {}
    for name in ("bf16", "fp8"):
        policy = load_model(tiny_folder, name, trainable=False).policy
        (batch,) = pack([TokenSequence.of_answer(*pair) for pair in answers], 4096)
        log_probs[name] = Scorer(policy).score(batch).log_probs.double()
        hidden = Scorer(policy).hidden_states(batch)[0]
        logits[name] = policy.decoder.lm_head.logits(policy.weights("training"), hidden).double()
    assert found.tokens == len(log_probs["fp8"]) == 5 * 5
    p, q = (torch.log_softmax(logits[name], -1) for name in ("bf16", "fp8"))
    kl = torch.nn.functional.kl_div(q, p, reduction="batchmean", log_target=True)
    changed = (p.argmax(-1) != q.argmax(-1)).double().mean()
    rms = (log_probs["fp8"] - log_probs["bf16"]).square().mean().sqrt()
    close = found.flows[1].closeness
    assert close is not None
    assert close.perplexity == pytest.approx(float((-log_probs["fp8"].mean()).exp()), rel=1e-6)
    assert close.rms == pytest.approx(float(rms), rel=1e-4)
    assert close.rms > 0
    assert close.kl == pytest.approx(float(kl), rel=1e-3)
    assert close.changed == pytest.approx(float(changed))


def greedy_answers(folder: Path) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Five prompts with what ``bf16`` answers."""
    prompts = [row["prompt"] for row in held_out()[:5]]
    made = generate(folder, prompts, precision="bf16", max_new_tokens=5)
    return [(one.prompt.token_ids, one.completions[0].token_ids) for one in made]


def held_out() -> list[dict[str, str]]:
    text = (starter_folder() / "held_out.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_a_flow_that_is_bf16_by_its_options_differs_in_nothing(
    make_config: MakeConfig, tiny_folder: Path
) -> None:
    (same,) = presets("fp8", first_layers_bf16=TINY.num_layers)
    found = compare_flows(tiny_folder, make_config(), [same]).flows[1]
    assert found.closeness is not None
    assert (found.closeness.kl, found.closeness.rms, found.closeness.changed) == (0.0, 0.0, 0.0)
    assert found.difference == 0.0


def test_flows_that_differ_in_the_backward_are_named_apart_and_answer_alike(
    make_config: MakeConfig, tiny_folder: Path
) -> None:
    asked = [*presets("int8"), *presets("int8", dgrad="fp8", wgrad="bf16")]
    _, plain, mixed = compare_flows(tiny_folder, make_config(), asked).flows
    assert plain.name == "int8"
    assert mixed.name == '{preset = "int8", dgrad = "fp8", wgrad = "bf16"}'
    assert plain.closeness == mixed.closeness


def test_one_flows_weights_are_in_memory_at_a_time(
    make_config: MakeConfig, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[weakref.ref[Policy]] = []

    def loading(*arguments: Any) -> Any:
        gc.collect()
        assert not [one for one in seen if one() is not None]
        model = load_model(*arguments)
        seen.append(weakref.ref(model.policy))
        return model

    monkeypatch.setattr(flows, "load_model", loading)
    compare_flows(tiny_folder, make_config(), presets("fp8", "int8"))
    assert len(seen) == 3


def test_answers_of_the_data_are_scored_where_a_column_is_named(
    make_config: MakeConfig, tiny_folder: Path
) -> None:
    found = compare_flows(tiny_folder, make_config(), presets("int8"), answers="answer")
    answers = [row["answer"] for row in held_out()[:5]]
    assert found.tokens == sum(map(len, answers))  # a token a digit
    with pytest.raises(DataError, match=r"held_out/0 has no text in the column 'solution'"):
        compare_flows(tiny_folder, make_config(), presets("int8"), answers="solution")


def test_a_flow_that_does_not_fit_is_refused_before_anything_is_computed(
    make_config: MakeConfig, tiny_folder: Path
) -> None:
    (wrong,) = presets("fp8", modules_bf16=("gone_proj",))
    with pytest.raises(ConfigError, match=r"'gone_proj', which the model does not have"):
        compare_flows(tiny_folder, make_config(), [wrong])


# The rule.


def row(
    name: str, rms: float = 0.1, size: int = 50, scores: tuple[float, ...] = (), **options: Any
) -> FlowFigures:
    """A flow of a tiny model with figures of its own."""
    (precision,) = presets(name, **options)
    flow = build_flow(precision, decoder_shape(TINY))
    close = Closeness(2.0, 0.01, rms, 0.1)
    return FlowFigures(precision, flow, size, 0, None, close, 10.0, 10.0, scores=scores)


def compared(*others: FlowFigures, tokens: int = 5000) -> Comparison:
    """With ``bf16``, graded where the others have scores."""
    graded = others[0].scores
    base = row("bf16", 0.0, 100, (1.0,) * len(graded))
    if not graded:
        return Comparison("m", [base, *others], 10, tokens)
    every = []
    for one in (base, *others):
        found = differences_of(one.scores, base.scores)
        mean = sum(found) / len(found)
        result = EvalResult(1 + mean, None, len(found), 1, 0, {}, 1.0, 0.0)
        interval = None if one is base else paired_interval(found)
        every.append(replace(one, result=result, difference=mean, interval=interval))
    return Comparison("m", every, len(graded), tokens)


def right(problems: int, wrong: int = 0) -> tuple[float, ...]:
    return (0.0,) * wrong + (1.0,) * (problems - wrong)


def test_the_cheapest_flow_without_a_loss_is_recommended() -> None:
    fp8 = row("fp8", 0.3, 51, right(1000))
    choice = recommend(compared(fp8, row("int8", 0.1, 52, right(1000))))
    assert choice is not None
    assert choice.decided
    assert choice.flow.precision.preset == "int8", "bytes differ by 2%: the closer one"
    assert "no loss beyond 1 point (+0.0 points, 95% interval -0.4 to +0.4)" in choice.sentence
    choice = recommend(compared(fp8, row("int8", 0.1, 60, right(1000))))
    assert choice is not None
    assert choice.flow.precision.preset == "fp8", "smaller by more than 5%"


def test_a_flow_that_loses_is_not_recommended() -> None:
    choice = recommend(compared(row("fp8", scores=right(1000, 100))))
    assert choice is not None
    assert (choice.flow.precision.preset, choice.decided) == ("bf16", True)
    assert choice.sentence.endswith("every 8-bit flow loses more than 1 point")


def test_too_few_problems_decide_nothing_and_how_many_would_is_said() -> None:
    choice = recommend(compared(row("int8", scores=right(20))))
    assert choice is not None
    assert (choice.flow.precision.preset, choice.decided) == ("bf16", False)
    assert "20 problems do not decide" in choice.sentence
    assert choice.sentence.endswith("about 390 would")


def test_an_inexact_or_a_larger_and_slower_flow_is_never_recommended() -> None:
    for one in (row("fp8-rollout", scores=right(1000)), row("int8", 0.1, 100, right(1000))):
        choice = recommend(compared(one))
        assert choice is not None
        assert choice.flow.precision.preset == "bf16"


def test_without_a_reward_the_rms_decides() -> None:
    def chosen(*rows: FlowFigures, tokens: int = 5000) -> tuple[str, bool]:
        choice = recommend(compared(*rows, tokens=tokens))
        assert choice is not None
        return choice.flow.precision.preset, choice.decided

    assert chosen(row("fp8", 0.3), row("int8", 0.1)) == ("int8", True)
    assert chosen(row("fp8", 0.3), row("int8", 0.1), tokens=999) == ("bf16", False)
    assert chosen(row("fp8", 0.5), row("int8", 0.2)) == ("bf16", False), "above the bound"
    assert chosen(row("fp8", 0.1), row("int8", 0.06)) == ("bf16", False), "more than half"
    assert chosen(row("int8", 0.01)) == ("bf16", False), "nothing to compare it with"


def test_as_many_problems_as_are_asked_for_decide() -> None:
    needed = problems_needed([0.0] * 20, 0.01)
    assert needed == 390
    assert paired_interval([0.0] * needed)[0] >= -0.01 > paired_interval([0.0] * 370)[0]
    worse = [-1.0, *[0.0] * 9]
    needed = problems_needed(worse, 0.01)
    assert needed is not None
    assert paired_interval(worse)[1] > -0.01 > paired_interval(worse * (needed // 10 + 1))[1]
    assert problems_needed([-0.01, -0.01], 0.01) is None


def test_one_better_answer_of_twenty_proves_no_absence_of_loss() -> None:
    low, high = paired_interval([1.0, *[0.0] * 19])
    assert low < -0.1
    assert high > 0.1


# Crests.


def spiked_policy(changes: Mapping[str, Any] = {}, **options: Any) -> Policy:
    """A policy whose embeddings are rows of a Hadamard matrix of 128 over half of the channels: the
    rotation makes each one number, sqrt(256) times the root mean square.
    """
    config = tiny_model(hidden_size=256, num_layers=1, **changes)
    (precision,) = presets("int8", **options)
    policy = random_policy(config, precision, seed=0)
    signs = torch.tensor([(-1.0) ** (5 & place).bit_count() for place in range(128)])
    with torch.no_grad():
        table = policy.masters["embed_tokens.weight"]
        table.zero_()
        table[:, :128] = signs
    policy.publish()
    return policy


def test_crests_are_found_by_site_and_the_key_to_paste_is_said() -> None:
    policy, batch = spiked_policy(), pack([TokenSequence.of_answer((1, 2), (3, 4))], 64)[0]
    first, *others = measure_crests(policy, batch)
    assert (first.site, first.share) == ("layers.0.qkv_proj", 1.0)
    assert first.largest == pytest.approx(16.0)
    assert [one.site.rpartition(".")[2] for one in others] == [
        "o_proj",
        "gate_up_proj",
        "down_proj",
    ]
    (line,) = notice_crests(policy, [(1, 2, 3), (4,), (5, 6)])
    assert line.startswith("INT8: in 5 tokens crests in front of ")
    assert "layers.0.qkv_proj (100.0% of tokens, up to 16.0)" in line
    named = json.loads(line.partition("precision.modules_bf16 = ")[2])
    assert "layers.0.qkv_proj" in named
    kept = measure_crests(spiked_policy(modules_bf16=named), batch)
    assert not {one.site for one in kept} & set(named)


def test_names_of_experts_to_paste_are_those_of_the_recipe() -> None:
    changes = {"family": "qwen3_moe", "experts": Experts(4, 2, 128, renormalise=True)}
    batch = pack([TokenSequence.of_answer((1, 2), (3, 4))], 64)[0]
    sites = [one.site for one in measure_crests(spiked_policy(changes), batch)]
    assert sites[2:] == ["layers.0.experts.gate_up_proj", "layers.0.experts.down_proj"]
    line = describe_crests([Crest(site, 0.5, 13.0) for site in sites[2:]], 4)
    named = json.loads(line.partition("precision.modules_bf16 = ")[2])
    kept = measure_crests(spiked_policy(changes, modules_bf16=named), batch)
    assert [one.site for one in kept] == sites[:2]


def test_few_tokens_of_the_first_prompts_are_read() -> None:
    policy = random_policy(TINY, *presets("int8"), seed=0)
    (line,) = notice_crests(policy, [(1, 2, 3)] * 9, most=8)
    assert line.startswith("INT8: in 8 tokens no crest in front of ")
    assert notice_crests(policy, [(1,)]) == []
    assert notice_crests(random_policy(TINY, *presets("fp8"), seed=0), [(1, 2, 3)]) == []


def test_a_run_in_int8_says_its_crests_at_the_start(make_config: MakeConfig) -> None:
    for preset, times in (("int8", 1), ("fp8", 0)):
        shown = io.StringIO()
        console = Console(rich.console.Console(file=shown))
        config = make_config(precision=preset, training={"steps": 1})
        train(config.model_copy(update={"output": config.output.with_name(preset)}), console)
        head, _, _ = shown.getvalue().partition("before: ")
        assert head.count("INT8: in ") == times


# The command.

WORDS = ["flows", "starter", "--data", "starter:held_out.jsonl", "--problems", "20", "--threads"]
SMALL = [*WORDS, "1", "--max-new-tokens", "4"]


def test_the_command_compares_the_starters_flows(capsys: pytest.CaptureFixture[str]) -> None:
    reward = ["--reward", "isobit.starter.tasks:correct_answer"]
    assert main([*SMALL, *reward, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = [one["name"] for one in found["flows"]]
    assert names == ["bf16", "int8", "fp8", '{preset = "fp8", attention = "int8"}', "fp8-linear"]
    base, int8, fp8 = found["flows"][:3]
    assert base["evaluation"]["problems"] == found["problems"] == 20
    assert base["interval"] is None
    assert int8["weight_bytes"] < base["weight_bytes"]
    assert int8["kv_bytes_per_token"] < base["kv_bytes_per_token"]
    assert int8["closeness"]["rms"] < fp8["closeness"]["rms"]
    assert len(int8["crests"]["linears"]) == 16
    assert found["recommended"]["flow"] == "bf16"
    assert not found["recommended"]["decided"]


@pytest.mark.exhaustive
def test_the_table_has_a_line_for_each_flow(capsys: pytest.CaptureFixture[str]) -> None:
    table = '{preset = "fp8", modules_bf16 = ["down_proj"]}'
    assert main([*SMALL, "--flows", table, "int8"]) == 0
    shown = capsys.readouterr().out
    assert shown.index("\nint8") < shown.index("\n{preset"), "the default is first"
    tables = [part for part in shown.split("\n\n") if "\nint8 " in part]
    assert len(tables) >= 2 and {part.count(f"\n{table}") for part in tables} == {1}
    assert "minus bf16" not in shown, "nothing was graded"
    assert shown.splitlines()[-1].startswith('recommended: precision = "bf16": ')


def test_memory_and_speed_of_a_gpu_need_no_data(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["flows", "starter", "--gpu", "h200", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    estimates = {one["name"]: one["estimate"] for one in found["flows"]}
    assert estimates["bf16"]["generated_tokens_per_s"] > 0
    assert 0 < estimates["int8"]["trained_tokens_per_s"] < estimates["fp8"]["trained_tokens_per_s"]
    assert found["recommended"] is None


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["flows", "starter"], "--data is missing"),
        (["flows", "starter", "--gpu", "0.00001"], "name a larger --gpu"),
        ([*SMALL, "--precision", "int8"], "named by --flows"),
        ([*SMALL, "--cluster.rollout_tp", "2"], "cluster.rollout_tp = 2"),
        ([*SMALL, "--flows", "int9"], "'int9'"),
        ([*SMALL, "--flows", '{preset = "int8", wgrat = "bf16"}'], "wgrat"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert problem in capsys.readouterr().err


def test_a_loss_of_nothing_cannot_be_excluded() -> None:
    with pytest.raises(SystemExit):
        main([*SMALL, "--loss", "0"])


BY_SIZE: dict[str, Any] = {
    "task": "sums",
    "steps": [150],
    "cards": ["NVIDIA H200"],
    "days": ["2026-11-25", "2026-11-26"],
    "sizes": [
        {
            "name": name,
            "layer_parameters": count,
            "flows": {
                "fp8": {
                    "seeds": seeds,
                    **{
                        stage: {"mean": mean, "low": mean - 0.01, "high": mean + 0.02}
                        for stage in ("before", "after")[: 1 + seeds]
                    },
                }
            },
        }
        for name, count, mean, seeds in (
            ("large", 1_107_000_000, -0.05, 0),
            ("small", 25_000_000, -0.3, 3),
        )
    ],
}


def test_nothing_is_said_of_sizes_that_were_not_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(flow_choice, "BY_SIZE", tmp_path / "none.json")
    assert main(["flows", "starter", "--gpu", "h200"]) == 0
    shown = capsys.readouterr().out
    assert "by size" not in shown
    assert "for 16 prompts of 256 tokens with 16 answers of 256 each" in shown, "half of a context"
    assert main(["flows", "starter", "--gpu", "h200", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["by_size"] is None


def test_what_is_known_by_size_names_where_it_was_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "by_size.json"
    path.write_text(json.dumps(BY_SIZE), encoding="utf-8")
    monkeypatch.setattr(flow_choice, "BY_SIZE", path)
    assert main(["flows", "starter", "--gpu", "h200"]) == 0
    lines = capsys.readouterr().out.splitlines()
    place = lines.index(
        "by size, the difference to bf16 before and after 150 steps of GRPO, points (seeds):"
    )
    flow, small, large, measured, others, own = lines[place + 2 :][:6]
    assert flow == "fp8"
    assert small == "  25 million (small)     -30.0 [-31.0, -28.0]  -30.0 [-31.0, -28.0] (3)"
    assert large == "  1,107 million (large)     -5.0 [-6.0, -3.0]                         -"
    assert measured == (
        "measured on sums (NVIDIA H200, 2026-11-25 to 2026-11-26); other tasks differ"
    )
    flows = 'int8, {preset = "fp8", attention = "int8"}, fp8-linear'
    assert others == f"not measured there: {flows}"
    shape = describe_model(starter_folder()).config
    assert own == (
        f"this model has {layer_parameters(shape):,} parameters in its layers, smaller than all "
        "of these"
    )
    assert main(["flows", "starter", "--gpu", "h200", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["by_size"] == BY_SIZE


@pytest.mark.parametrize("width", [40, 60, 80, 120, 300])
def test_tables_are_no_wider_than_the_terminal(width: int) -> None:
    """They have all cells at any width; a name of a flow stays whole."""
    found = compared(
        row("int8", scores=right(8)),
        row("int8", scores=right(8), dgrad="fp8", wgrad="bf16"),
    )
    estimate = {"generated_tokens_per_s": 123456.0, "trained_tokens_per_s": 1234567.0}
    flows = [replace(one, estimate=estimate) for one in found.flows]
    found = replace(found, flows=flows, by_size=read_by_size(), card="H200", layer_parameters=9)
    lines = describe_comparison(found, width)
    sentences = ("by size", "measured on", "this model", "recommended", "isobit flows", "H200: ")
    sentences += ("not measured there",)
    tables = [line for line in lines if not line.startswith(sentences)]
    allowed = max(width, len(flows[-1].name))
    assert [line for line in tables if len(line) > allowed] == []
    cells = " ".join(" ".join(tables).split())
    for cell in ("perplexity", "minus bf16", "KV a token", "H200 trained", "1,234,567/s", "before"):
        assert cell in cells, cell
    assert cells.count("[-48.3, -29.3] (3)") == 1


def test_the_place_of_a_model_among_the_sizes_is_said() -> None:
    for count, said in ((26_000_000, "inside this range"), (2 * 10**9, "larger than all of these")):
        found = replace(compared(row("int8")), by_size=BY_SIZE, layer_parameters=count)
        assert any(line.endswith(said) for line in describe_comparison(found))


def test_parameters_of_layers_are_those_of_their_matrices() -> None:
    """Of Qwen3-8B: without embeddings, the head and norms."""
    attention, mlp = 2 * 4096 * (4096 + 1024), 3 * 4096 * 12288
    assert layer_parameters(model_shape("qwen3-8b")) == 36 * (attention + mlp)


def test_the_description_has_no_infinite_or_missing_number() -> None:
    lines = describe_comparison(compared(row("int8", scores=right(20))))
    assert not [line for line in lines if "nan" in line or "None" in line]
