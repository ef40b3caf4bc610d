"""Rules across fields: each refusal names the keys, their values and the way out."""

import re
from typing import Any

import pytest

from isobit.config.load import build
from isobit.config.model_shape import ModelShape
from isobit.config.recipes import RunConfig, SftConfig
from isobit.config.rules import check_has_sets, check_run, check_samples, check_sft
from isobit.config.tables import EvaluationConfig
from isobit.config.teacher import RunTeacher
from isobit.run.model_source import check_shape
from isobit.util.errors import ConfigError

SUMS = {"type": "jsonl", "path": "sums.jsonl"}
TWICE = {"epochs": 2}
BEST = "eval/held_out/accuracy"
PART_MODEL = {"model": "folder", "weight": 0.1}
TWO = {"function": "f.py:f", "model": "folder"}
THREE_UPDATES = {"updates_per_batch": 3, "prompts_per_step": 2}
CALIBRATED = {"calibrate_every": 20}
CALIBRATED_TWICE = {"algorithm": CALIBRATED, "training": TWICE}
CLIP_COV = {"covariance": "clip_cov", "covariance_low": 5.0}
KL_COV = {"covariance": "kl_cov"}
UNCLIPPED = {"clip": "none"}
BY_TURN = {"credit": "turn"}
ACTING = {"environment": {"class": "calculator"}}


def run_config(**tables: Any) -> RunConfig:
    values = {"output": "out", "data": {"train": SUMS, "eval": {"held_out": SUMS}}, **tables}
    return build(RunConfig, values, "test")


def sft_config(**tables: Any) -> SftConfig:
    values = {"output": "out", "data": {"train": SUMS, "eval": {"held_out": SUMS}}, **tables}
    return build(SftConfig, values, "test")


def test_what_contradicts_nothing_passes() -> None:
    check_run(run_config(checkpoint={"keep_best": BEST}))
    check_run(run_config(evaluation={"samples": 4, "temperature": 1.0}))
    check_sft(sft_config(checkpoint={"keep_best": "eval/held_out/loss"}))
    check_sft(sft_config(reward={}, checkpoint={"keep_best": BEST}))
    check_run(run_config(reward={"model": "folder"}))
    check_run(run_config(reward={"function": "code", "options": {"seconds": 9.5}}))
    check_run(run_config(reward={"function": "code", "deadline_s": 1, "in_process": True}))
    check_run(run_config(reward={"function": "mine.py:f", "options": {"seconds": 60}}))
    check_run(run_config(reward={"parts": {"a": {"function": "math_verify"}, "b": PART_MODEL}}))
    check_samples(EvaluationConfig())
    check_run(run_config(algorithm={"name": "rloo", "kl_coefficient": 0.1}))
    check_run(run_config(algorithm={"overlong_buffer": 512, "kl_coefficient": 0.1}))
    check_run(run_config(algorithm={"name": "dr_grpo", "loss_constant": 8}))
    check_run(run_config(algorithm={"turn_gamma": 0.9, **BY_TURN}, **ACTING))
    check_run(run_config(reward={"function": "environment"}, **ACTING))
    check_run(run_config(replay={"fraction": 0.5, "max_staleness": 4}, **{"async": {"lag": 3}}))
    check_run(run_config(**CALIBRATED_TWICE))
    check_run(run_config(algorithm=CALIBRATED, training={"updates_per_batch": 2}))
    check_run(run_config(algorithm=UNCLIPPED, precision="int8", **{"async": {"lag": 8}}))
    check_run(run_config(algorithm=UNCLIPPED | CLIP_COV | {"covariance_high": 6.0}))
    recorded = {"old_log_probs": "recorded", **TWICE}
    for preset in ("fp8-rollout", "int8-rollout"):
        check_run(run_config(algorithm=CALIBRATED, training=recorded, precision=preset))
    for preset in ("fp8-linear", "int8", "int8-linear"):
        check_run(run_config(**CALIBRATED_TWICE, precision=preset))
    check_run(
        run_config(
            corrections=[{"type": "tis"}, {"type": "mis", "level": "geometric"}, {"type": "k3"}]
        )
    )


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"training": THREE_UPDATES}, "training.updates_per_batch is 3, but a step has 2 prompts"),
        ({"rollout": {"temperature": 0}}, "rollout.temperature is 0"),
        ({"algorithm": {"turn_gamma": 0.9}}, "algorithm.turn_gamma is 0.9, but algorithm.credit"),
        ({"algorithm": BY_TURN}, "without [environment] a completion has one turn"),
        (
            {"algorithm": BY_TURN, **ACTING, "replay": {"fraction": 0.5}},
            "algorithm.credit is 'turn', and replay.fraction 0.5",
        ),
        *(
            ({"algorithm": {"name": name, **BY_TURN}, **ACTING}, f"but algorithm '{name}' has")
            for name in ("ppo", "reinforce_pp", "gspo", "remax")
        ),
        (
            {"evaluation": {"samples": 2}},
            "evaluation.samples is 2, but evaluation.temperature is 0",
        ),
        ({"checkpoint": {"keep_last": 0, "keep_every": 4}}, "checkpoint.keep_last is 0"),
        ({"checkpoint": {"every": 4, "keep_every": 6}}, "is 6, but checkpoint.every is 4"),
        ({"checkpoint": {"every": 0, "keep_every": 6}}, "is 6, but checkpoint.every is 0"),
        ({"checkpoint": {"keep_last": 0, "keep_best": BEST}}, "checkpoint.keep_last is 0"),
        ({"checkpoint": {"keep_best": "eval/held_out/pass@2"}}, f"gives; name one of {BEST}"),
        ({"checkpoint": {"keep_best": BEST}, "data": {"train": SUMS}}, "data.eval names no set"),
        ({"algorithm": {"kl_coefficient": 0.1, "kl_estimator": "k1"}}, "kl_estimator 'k1' in the"),
        ({"algorithm": {"overlong_buffer": 513}}, "algorithm.overlong_buffer is 513, but"),
        ({"algorithm": {"loss_constant": 8}}, "algorithm.loss_constant is 8, but"),
        ({"algorithm": CLIP_COV}, "algorithm.covariance_low is 5 and covariance_high 5"),
        ({"algorithm": KL_COV | {"dual_clip": 3.0}}, "algorithm.dual_clip is set, but covariance"),
        ({"algorithm": KL_COV | CALIBRATED}, "algorithm.calibrate_every is set, but covariance"),
        ({"algorithm": UNCLIPPED | {"dual_clip": 3.0}}, "dual_clip is set, but clip 'none' bounds"),
        ({"algorithm": UNCLIPPED, "precision": "fp8-rollout"}, "precision.preset is 'fp8-rollout'"),
        (
            {"algorithm": UNCLIPPED, "rollout": {"engine": "vllm"}},
            "engine is 'vllm', whose",
        ),
        (
            {"algorithm": UNCLIPPED, "training": {"old_log_probs": "recomputed"}},
            "old_log_probs is 'recomputed', to which ratios are taken instead; leave",
        ),
        ({"algorithm": CALIBRATED}, "algorithm.calibrate_every is 20, but a step has one update"),
        ({**CALIBRATED_TWICE, "precision": "bf16"}, "is 20, but precision.preset is 'bf16'"),
        ({**CALIBRATED_TWICE, "precision": "fp8-rollout"}, "precision.preset is 'fp8-rollout'"),
        ({**CALIBRATED_TWICE, "precision": "int8-rollout"}, "precision.preset is 'int8-rollout'"),
        (
            {**CALIBRATED_TWICE, "async": {"lag": 1}},
            "async.lag is 1, and algorithm.calibrate_every",
        ),
        (
            {"replay": {"fraction": 0.5}, "training": TWICE, "async": {"lag": 2}},
            "replay.max_staleness is 4, but with async.lag = 2 a completion is 6 updates old",
        ),
        ({"cluster": {"rollouters": 1}}, "cluster.rollouters is 1, but async.lag is 0"),
        (
            {"cluster": {"rollout_tp": 2, "rollouters": 1}, "async": {"lag": 1}},
            "cluster.rollout_tp is 2, but cluster.rollouters is 1",
        ),
        (
            {"cluster": {"rollout_tp": 2}, "async": {"max_staleness": 1}},
            "cluster.rollout_tp is 2, but async.max_staleness is set",
        ),
        (
            {"cluster": {"rollout_tp": 2}, "lora": {"rank": 4}},
            "cluster.rollout_tp is 2, but lora is set",
        ),
        (
            {"cluster": {"rollout_tp": 2}, "precision": {"kv_scales": "per_tensor"}},
            "cluster.rollout_tp is 2, but precision.kv_scales is 'per_tensor'",
        ),
        (
            {
                "cluster": {"rollout_tp": 2},
                "rollout": {"engine": "http", "servers": ["http://h:1"]},
            },
            "cluster.rollout_tp is 2, but rollout.engine is 'http', and only the native one",
        ),
        ({"corrections": [{"type": "tis"}, {"type": "mis"}]}, "corrections has tis and mis"),
        (
            {"training": {"samples_per_prompt": 1}},
            "compares the samples of a prompt with each other",
        ),
        (
            {"training": {"samples_per_prompt": 1}, "algorithm": "reinforce_pp_baseline"},
            "one of 'reinforce_pp', 'ppo', 'remax'",
        ),
        ({"algorithm": {"name": "ppo", "dynamic_sampling": True}}, "leave dynamic_sampling out"),
        ({"corrections": [{"type": "normalise"}, {"type": "tis"}]}, "normalise comes last"),
        ({"reward": {"function": "mine.py:f", "model": "folder"}}, "and reward.model is 'folder'"),
        ({"reward": {"model": "folder", "options": {"x": 1}}}, "reward.options are keyword"),
        ({"reward": {"function": "environment"}}, "reward.function is 'environment', the reward"),
        (
            {"reward": {"parts": {"a": {"function": "environment"}, "b": PART_MODEL}}},
            "reward.parts.a.function is 'environment', the reward that an environment gives",
        ),
        (
            {"reward": {"function": "mine.py:f", "parts": {"a": PART_MODEL}}},
            "reward.function is 'mine.py:f', but reward.parts names several rewards; move it",
        ),
        ({"reward": {"weight": 2.0, "parts": {"a": PART_MODEL}}}, "reward.weight is 2.0, but"),
        (
            {"reward": {"parts": {"a": {"weight": 2.0}}}},
            "reward.parts.a needs a function or a model",
        ),
        (
            {"reward": {"parts": {"a": TWO}}},
            "reward.parts.a needs a function or a model, and has 'f",
        ),
        (
            {"reward": {"function": "code", "options": {"seconds": 10}}},
            "reward.options.seconds of the grader 'code' is 10, but reward.deadline_s is 10",
        ),
        (
            {"reward": {"parts": {"a": {"function": "code"}}, "deadline_s": 5}},
            "reward.parts.a.options.seconds of the grader 'code' is 5 by default, but",
        ),
    ],
)
def test_a_run_that_contradicts_itself_is_refused(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_run(run_config(**tables))


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"reward": {}, "data": {"train": SUMS}}, "reward is set, but data.eval names no set"),
        ({"reward": {}, "evaluation": {"samples": 2}}, "evaluation.samples is 2"),
        ({"reward": {"parts": {"a": {}}}}, "reward.parts.a needs a function or a model"),
        ({"reward": {"function": "environment"}}, "name one in environment.class, or another"),
        ({"checkpoint": {"keep_best": BEST}}, "name one of eval/held_out/loss"),
        ({"checkpoint": {"keep_last": 0, "keep_every": 4}}, "checkpoint.keep_last is 0"),
        ({"cluster": {"rollouters": 1}}, "cluster.rollouters is 1, but fine-tuning learns from"),
        ({"cluster": {"rollout_tp": 2}}, "cluster.rollout_tp is 2, but without a reward nothing"),
    ],
)
def test_a_tuning_that_contradicts_itself_is_refused(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_sft(sft_config(**tables))


def test_greedy_samples_do_not_matter_where_nothing_is_graded() -> None:
    check_sft(sft_config(evaluation={"samples": 2}))


def test_passes_at_k_are_figures_of_several_samples() -> None:
    several = {"samples": 4, "temperature": 1.0}
    check_run(run_config(evaluation=several, checkpoint={"keep_best": "eval/held_out/pass@4"}))


def test_an_evaluation_needs_a_set() -> None:
    with pytest.raises(ConfigError, match=r"data.eval names no set to evaluate on"):
        check_has_sets({})


def test_heads_have_a_whole_size() -> None:
    sizes = {"hidden_size": 130, "intermediate_size": 256, "num_layers": 1, "num_heads": 4}
    with pytest.raises(ConfigError, match="which 4 heads do not divide"):
        check_shape(ModelShape.model_validate(sizes))
    check_shape(ModelShape.model_validate({**sizes, "head_dim": 32}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "mixtral", "num_experts": None}, "num_experts is None, and family 'mixtral'"),
        ({"family": "qwen3", "num_experts": 4}, "num_experts is 4, and family 'qwen3'"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5, more than there are"),
        ({"family": "mixtral", "moe_intermediate_size": 64}, "moe_intermediate_size is for"),
        ({"sliding_window": 8}, "sliding_window is 8, and family 'qwen3_moe'"),
        ({"shared_expert_intermediate_size": 8}, "qwen3_5_moe_text and qwen3_next have a shared"),
        ({"linear_key_head_dim": 8}, "qwen3_5_text, qwen3_5_moe_text, qwen3_next have gated delta"),
        ({}, None),
        ({"family": "mixtral", "sliding_window": 8}, None),
        ({"family": "qwen3_next", "linear_key_head_dim": 8, "moe_intermediate_size": 8}, None),
    ],
)
def test_a_shape_has_what_its_family_has(changes: dict[str, Any], message: str | None) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_layers": 1, "num_heads": 4}
    mixture = {"family": "qwen3_moe", "num_experts": 4}
    shape = ModelShape.model_validate({**sizes, **mixture, **changes})
    if message is None:
        check_shape(shape)
    else:
        with pytest.raises(ConfigError, match=message):
            check_shape(shape)


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"warmup_ratio": 0.1, "warmup_updates": 3}, "warmup_ratio is 0.1, and training.warmup_up"),
        ({"min_learning_rate": 1e-7}, "training.schedule is 'constant', which never falls"),
        (
            {"min_learning_rate": 1e-3, "schedule": "cosine"},
            "min_learning_rate is 0.001, above training.learning_rate = 1e-06; set it below",
        ),
    ],
)
def test_learning_rates_that_contradict_one_another(training: dict[str, Any], message: str) -> None:
    for check in (
        lambda: check_run(run_config(training=training)),
        lambda: check_sft(sft_config(training=training)),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            check()


@pytest.mark.parametrize(
    ("changes", "function"),
    [
        ({"teacher": {"model": "t", "only": True}}, "none"),
        ({"teacher": RunTeacher(model="t", only=True)}, "none"),
        ({"teacher": {"model": "t", "only": True}, "reward": {"workers": 2}}, "reasoning_gym"),
        ({"teacher": {"model": "t"}}, "reasoning_gym"),
        ({}, "reasoning_gym"),
        (
            {
                "teacher": {"model": "t", "only": True},
                "data": {"train": {"type": "reasoning_gym", "task": "chain_sum"}},
            },
            "reasoning_gym",
        ),
    ],
)
def test_where_a_teacher_alone_teaches_nothing_else_has_to_grade(
    changes: dict[str, Any], function: str
) -> None:
    values = {"model": "m", "output": "o", "data": {"train": {"type": "jsonl", "path": "a.jsonl"}}}
    assert build(RunConfig, {**values, **changes}, "test").reward.function == function
