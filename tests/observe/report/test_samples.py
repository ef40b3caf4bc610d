"""Which completions are shown, and how their tokens are shaded.

The precision flow out of the manifest.
"""

from pathlib import Path

import pytest

from isobit.config.precision import PrecisionConfig
from isobit.models.config import Lora
from isobit.models.decoder import decoder_shape
from isobit.observe.figures import Figures
from isobit.observe.report.flow_view import view_flow
from isobit.observe.report.samples import MOST_PROMPTS, MOST_TOKENS, choose_samples
from isobit.observe.run_record import RunRecord
from isobit.precision.flow import build_flow, describe_flow
from isobit.store.manifest import precision_graph
from tests.observe.report.run_files import SITES, completion_line, manifest
from tests.tiny import TINY, tiny_model


def test_training_samples_are_spread_and_evaluated_problems_come_first_and_last() -> None:
    train = [completion_line(step, tokens=2) for step in range(1, 101)]
    held_out = [
        completion_line(step, "held_out", 2) | {"prompt_id": f"held_out/{row}"}
        for step in (0, 50, 100)
        for row in range(20)
    ]
    of_training, of_held_out = choose_samples([*train, *held_out])
    steps = [problem.answers[0].step for problem in of_training.problems]
    assert steps == [1, 15, 29, 43, 58, 72, 86, 100]
    assert (of_training.shown, of_training.logged) == (MOST_PROMPTS, 100)
    assert [[answer.step for answer in problem.answers] for problem in of_held_out.problems] == [
        [0, 100]
    ] * MOST_PROMPTS


def test_the_best_and_the_worst_answer_to_a_prompt_stand_together() -> None:
    lines = [
        completion_line(step, tokens=1) | {"reward": reward}
        for step in range(1, 30)
        for reward in (1.0, 0.0)
    ]
    problems = choose_samples(lines)[0].problems
    assert [[answer.reward for answer in problem.answers] for problem in problems] == [
        ["1", "0"]
    ] * MOST_PROMPTS


def test_shades_follow_the_log_probability() -> None:
    line = completion_line(1) | {
        "token_texts": list("abcd\n"),
        "log_probs": [0.0, -0.3, -3.0, -9.0, None],
        "tokens": 5,
    }
    tokens = choose_samples([line])[0].problems[0].answers[0].tokens
    assert [token.shade for token in tokens] == [0, 1, 4, 5, 0]
    assert tokens[1].log_prob == "\u22120.3000 nats" and tokens[4].log_prob == "not finite"
    assert tokens[4].text == "\u21b5\n"


def test_long_completions_are_cut_and_counted() -> None:
    lines = [completion_line(step, tokens=512) | {"tokens": 9000} for step in range(1, 200)]
    answers = [
        answer for problem in choose_samples(lines)[0].problems for answer in problem.answers
    ]
    assert sum(len(answer.tokens) for answer in answers) <= MOST_TOKENS
    assert all(len(answer.tokens) + answer.left_out == 9000 for answer in answers)


def test_an_answer_says_how_it_compares_with_its_group_and_the_dataset() -> None:
    line = completion_line(1, tokens=1) | {"group_rewards": [1.0, 0.0, None, 0.5], "answer": 42}
    problem = choose_samples([line])[0].problems[0]
    assert (problem.answer, problem.answers[0].verdict) == ("42", "good")
    assert problem.answers[0].above == "+0.5 to its group's mean"
    worse = choose_samples([line | {"reward": 0.0}])[0].problems[0].answers[0]
    assert (worse.verdict, worse.above) == ("bad", "\u22120.5 to its group's mean")
    (source,) = choose_samples([completion_line(1) | {"group_rewards": "x", "reward": 0.5}])
    alone = source.problems[0].answers[0]
    assert (alone.verdict, alone.above) == ("", "")


def test_what_is_not_shown_with_its_tokens_is_listed_in_short() -> None:
    lines = [completion_line(step, text="many words ") for step in range(1, 101)]
    source = choose_samples(lines)[0]
    assert len(source.others) == 60
    step, prompt, completion, reward = source.others[0]
    assert (step, prompt, reward) == ("2", "What is 6 x 7?", "1")
    assert len(completion) == 161 and completion.endswith("\N{HORIZONTAL ELLIPSIS}")


def test_a_completion_without_tokens_is_shown_as_text() -> None:
    line = {"step": 1, "source": "train", "prompt_id": "train/1", "prompt": "p"}
    line |= {"completion": "c" * 5000, "reward": None}
    answer = choose_samples([line])[0].problems[0].answers[0]
    assert not answer.tokens and answer.reward == "failed"
    assert answer.text.endswith("[1000 more characters]")


def record(run: dict) -> RunRecord:
    return RunRecord(Path("runs/x"), run, Figures.of_rows({}), (), True, {}, False, ())


def test_a_flow_has_its_options() -> None:
    assert record({}).flow is None
    made = record({"config": {"precision": {"preset": "fp8", "attention": "int8", "wgrad": None}}})
    assert made.flow == '{preset = "fp8", attention = "int8"}'


def test_equal_layers_are_folded() -> None:
    flow = view_flow(record(manifest()))
    assert flow is not None and flow.verdict == "one function in rollout and training"
    assert [stage.title for stage in flow.stages] == ["", "layers 0 to 2, each", ""]
    assert [site.name for site in flow.stages[1].sites] == ["qkv_proj", "attention"]
    assert flow.stages[1].sites[0].wgrad == "E4M3" and flow.stages[1].sites[1].wgrad == ""


def test_a_layer_of_its_own_stays_apart_and_differences_are_marked() -> None:
    rollout = [
        site | ({"forward": "bf16"} if site["name"].startswith("layers.0") else {})
        for site in SITES
    ]
    precision = {"preset": "x", "exact": False, "differing_sites": ["layers.0.qkv_proj"]}
    precision |= {"rollout": rollout, "training": SITES}
    flow = view_flow(record(manifest(precision=precision)))
    assert flow is not None and flow.verdict == f"1 of {len(SITES)} sites differ between the sides"
    assert [stage.title for stage in flow.stages] == ["", "layer 0", "layers 1 to 2, each", ""]
    differing = [[site.differs for site in stage.sites] for stage in flow.stages]
    assert differing == [[False], [True, True], [False, False], [False]]


def test_int8_says_how_it_is_scaled() -> None:
    sites = [site | ({"forward": "int8"} if site["forward"] == "e4m3" else {}) for site in SITES]
    precision = {"preset": "int8", "exact": True, "rollout": sites, "training": sites}
    flow = view_flow(record(manifest(precision=precision)))
    assert flow is not None
    details = {site.name: (site.rollout, site.detail) for site in flow.stages[1].sites}
    assert details == {
        "qkv_proj": ("INT8", "Hadamard, a scale a row"),
        "attention": ("INT8", "a scale a token and head"),
    }


@pytest.mark.parametrize("dgrad", [None, "fp8", "int8"])
@pytest.mark.parametrize("wgrad", [None, "fp8", "int8", "bf16"])
def test_the_start_and_the_report_name_the_backwards_formats(
    dgrad: str | None, wgrad: str | None
) -> None:
    config = PrecisionConfig.model_validate({"preset": "int8", "dgrad": dgrad, "wgrad": wgrad})
    flow = build_flow(config, decoder_shape(TINY))
    named = {"fp8": "E4M3", "int8": "INT8", "bf16": "BF16"}
    of_dx, of_dw = named[dgrad or "int8"], named[wgrad or "int8"]
    lines = [line for line in describe_flow(flow) if "_proj" in line]
    assert lines and all(line.endswith(f"dgrad {of_dx}, wgrad {of_dw}") for line in lines)
    view = view_flow(record(manifest(precision=precision_graph(flow, True))))
    assert view is not None
    sites = [site for site in view.stages[1].sites if site.name.endswith("_proj")]
    assert len(sites) == 4
    assert {(site.dgrad, site.wgrad) for site in sites} == {(of_dx, of_dw)}


@pytest.mark.parametrize("preset", ["int8", "fp8", "bf16", "int8-rollout", "fp8-rollout"])
def test_frozen_linears_have_no_wgrad(preset: str) -> None:
    lora = Lora(4, 8.0, ("q_proj",))
    flow = build_flow(PrecisionConfig.model_validate(preset), decoder_shape(tiny_model(lora=lora)))
    lines = [line for line in describe_flow(flow) if "_proj" in line]
    assert lines and all(line.endswith(", no wgrad") for line in lines)
    assert all(line.count("dgrad") == 1 for line in lines), "a rollout has no backward"
    view = view_flow(record(manifest(precision=precision_graph(flow, True))))
    assert view is not None
    sites = [one for stage in view.stages for one in stage.sites if one.name.endswith("_proj")]
    assert {site.wgrad for site in sites} == {""} and all(site.dgrad for site in sites)


def test_no_manifest_no_flow() -> None:
    assert view_flow(record({})) is None
