"""Rows of lm_head that are no token of the tokenizer: never drawn, and in no sum on either side."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from isobit.config.precision import PrecisionConfig, Preset
from isobit.config.rollout import RolloutConfig
from isobit.data.tokenizer import tokenizer_size
from isobit.models.checkpoint import FolderCheckpoint
from isobit.models.config import ModelConfig
from isobit.models.decoder import NAME, Head
from isobit.models.folder import load_policy, read_config
from isobit.models.policy import Policy, random_masters, random_policy
from isobit.models.saving import save_policy
from isobit.models.scorer import ScoredPass, Scorer
from isobit.proof.verify import VerifyOptions, verify_policy
from isobit.records.text import Prompt, SamplingParams
from isobit.rollout.engine import generate
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Request
from isobit.store.compatible import ALL_TOKENS, Recorded, compare
from isobit.util.errors import ConfigError, ModelError
from tests.models.policies import whole_batch
from tests.tiny import TINY, save_tiny

TOKENS = 99
WIDE = replace(TINY, vocab_size=160, tokenizer_size=TOKENS)
NARROW = replace(WIDE, vocab_size=TOKENS, tokenizer_size=None)
PRESETS = get_args(Preset)
EXACT: tuple[Preset, ...] = ("fp8", "fp8-linear", "int8", "bf16", "fp32")


def masters(config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """The same of every number of rows; those beyond the tokenizer would win each draw."""
    for name, values in random_masters(replace(config, vocab_size=160), seed=3):
        if values.ndim == 2:
            values.mul_(6)
        if values.shape[0] == 160:
            values[TOKENS:] = 8 * values[: 160 - TOKENS]
            yield name, values[: config.vocab_size].clone()
        else:
            yield name, values


def made(config: ModelConfig, preset: Preset, tied: bool = True) -> Policy:
    shape = replace(config, tied_embeddings=tied)
    return Policy(shape, PrecisionConfig(preset=preset), masters(shape))


def batch() -> tuple[Any, torch.Tensor]:
    ids = torch.arange(70) * 37 % TOKENS
    packed = whole_batch(ids, (50, 20), targets=ids.flip(0))
    return packed, torch.linspace(-1, 1, 70)


@pytest.mark.few(5)
@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied"])
@pytest.mark.parametrize("preset", PRESETS)
def test_scores_and_gradients_are_those_of_a_model_without_these_rows(
    preset: Preset, tied: bool
) -> None:
    packed, d = batch()
    wide, narrow = made(WIDE, preset, tied), made(NARROW, preset, tied)
    scores = []
    for policy in (wide, narrow):
        step = ScoredPass(policy, packed, "none")
        scores.append((step.forward(), Scorer(policy).score(packed)))
        step.backward(d, d.flip(0))
    for one, other in zip(*scores, strict=True):
        assert torch.equal(one.log_probs, other.log_probs)
        assert torch.equal(one.entropies, other.entropies)
    for name, master in wide.masters.items():
        expected = narrow.masters[name].grad
        assert master.grad is not None and expected is not None
        if name in (NAME, "lm_head.weight"):
            assert master.grad.shape[0] == 160 and not master.grad[TOKENS:].any()
        assert torch.equal(master.grad[: len(expected)], expected), name


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.0}, {"top_k": 120}, {"top_p": 0.95}, {"min_p": 0.01}],
    ids=str,
)
def test_they_are_never_drawn(sampling: dict[str, Any]) -> None:
    """Though they are likelier by far than the tokens."""
    everything = made(replace(WIDE, tokenizer_size=None), "fp8")
    drawn = [drawn_by(policy, sampling) for policy in (made(WIDE, "fp8"), everything)]
    assert max(drawn[0]) < TOKENS <= max(drawn[1])


def drawn_by(policy: Policy, sampling: dict[str, Any]) -> list[int]:
    engine = NativeEngine(policy, RolloutConfig(), None, seed=0)
    prompt = Prompt("p", "", (1, 5, 8))
    requests = [Request(prompt, 0, 8, SamplingParams(32, **sampling))]
    return [
        token for group in generate(engine, requests) for one in group for token in one.token_ids
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize("preset", EXACT)
def test_rollout_and_training_have_the_same_bits(preset: Preset) -> None:
    result = verify_policy(made(WIDE, preset, tied=False), VerifyOptions(5, 2, 6))
    assert result.comparison.tokens_differing == 0 < result.comparison.tokens_compared


@pytest.mark.exhaustive
def test_a_side_that_counts_them_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training takes the softmax over all rows."""
    original = Head.token_log_probs

    def over_all_rows(self: Head, *arguments: Any) -> Any:
        return original(replace(self, num_drawn=self.vocab_size), *arguments)

    monkeypatch.setattr(Head, "token_log_probs", over_all_rows)
    result = verify_policy(made(WIDE, "fp8"), VerifyOptions(5, 2, 6))
    assert result.exit_code == 1 and result.comparison.tokens_differing > 0


def test_a_token_outside_the_distribution_is_not_scored() -> None:
    packed, _ = batch()
    packed = replace(packed, targets=packed.targets + 60)
    with pytest.raises(ModelError, match=r"token 158 is to be scored, .* holds 0 to 98"):
        Scorer(made(WIDE, "fp32")).score(packed)


def test_the_number_is_read_from_the_folder_and_files_keep_all_rows(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", replace(TINY, vocab_size=160))
    policy = load_policy(folder, "fp8")
    assert policy.config.tokenizer_size == tokenizer_size(folder) == TOKENS
    assert policy.config.num_drawn == TOKENS and policy.config.vocab_size == 160
    with torch.no_grad():
        policy.masters[NAME][150] = 1.5
    save_policy(policy, tmp_path / "out", folder)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 160
    found = dict(
        FolderCheckpoint.open(tmp_path / "out", read_config(tmp_path / "out")).masters("cpu")
    )
    table = found[NAME]
    assert isinstance(table, torch.Tensor)
    assert table.shape[0] == 160 and table[150].eq(1.5).all()


def test_the_largest_id_counts_and_not_the_number_of_tokens(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["model"]["vocab"]["<|im_end|>"] = 119
    content["added_tokens"].append({"id": 119, "content": "<|im_end|>", **flags, "special": True})
    path.write_text(json.dumps(content))
    assert tokenizer_size(folder) == 120, "the files have changed, and the answer with them"
    assert read_config(folder).num_drawn == 120


def test_a_folder_without_tokenizer_draws_every_row(tmp_path: Path) -> None:
    save_policy(random_policy(TINY, "fp32", seed=0), tmp_path / "model")
    assert read_config(tmp_path / "model").tokenizer_size is None


def test_a_tokenizer_that_fills_the_vocabulary_leaves_the_configuration_as_it_was() -> None:
    assert TINY.with_tokenizer(128) == TINY.with_tokenizer(None) == TINY
    assert TINY.with_tokenizer(200) == TINY, "check_vocabulary refuses it"
    assert replace(TINY, score_head=True).with_tokenizer(99).tokenizer_size is None


def test_a_run_that_drew_every_row_is_not_resumed_in_silence() -> None:
    """Checkpoints of older releases do not record the number."""
    from isobit.config.recipes import RunConfig

    config = RunConfig.model_construct()
    now, bits = {"model.tokens": "the first 99"}, {"bits": {}}
    for saved in ({}, {"model.tokens": ALL_TOKENS}):
        with pytest.raises(ConfigError, match=r"model\.tokens: 'every row of lm_head' in the run"):
            compare(Recorded(saved, bits), config, now, bits, [])
    assert not compare(Recorded({}, bits), config, {"model.tokens": ALL_TOKENS}, bits, [])
    assert not compare(Recorded(now, bits), config, now, bits, [])
