"""A reward model that grades a run's completions: its own tokenizer and template, and what cannot
be scored.
"""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from isobit.config.data import ChatConfig
from isobit.config.precision import PrecisionConfig
from isobit.data.prompts import prompts_of_rows
from isobit.data.sources import Row
from isobit.models.folder import read_reward_masters, reward_config
from isobit.models.policy import Policy
from isobit.models.saving import save_policy
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Prompt
from isobit.run.reward_models import ModelReward, load_model_reward
from isobit.starter import starter_folder
from isobit.starter.tasks import problems, question
from tools.starter.build import save_tokenizer
from tools.starter.tokenizer import PAD_ID, build_tokenizer

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
FP32 = PrecisionConfig(preset="fp32")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The starter with a drawn score head and a context of 64 tokens."""
    config = replace(reward_config(starter_folder(), PAD_ID), max_positions=64)
    policy = Policy(config, FP32, read_reward_masters(starter_folder(), config, seed=0))
    save_policy(policy, tmp_path, tokenizer_from=starter_folder())
    return tmp_path


def prompts(count: int = 3, template: str | None = None) -> list[Prompt]:
    tokenizer: PreTrainedTokenizerFast = build_tokenizer(512)
    tokenizer.chat_template = template
    rows = [Row(question(p), {}, "") for p in problems(held_out=True)[:count]]
    return prompts_of_rows("p", rows, tokenizer, ChatConfig())


def answer(text: str) -> Completion:
    return Completion(TokenSequence.of_answer([1], [2]), text, "stop")


@pytest.mark.few(1)
@pytest.mark.parametrize("preset", ["fp32", "bf16", "fp8", "int8"])
def test_a_completion_has_the_score_of_its_conversation(preset: str, folder: Path) -> None:
    reward = load_model_reward(folder, PrecisionConfig.model_validate(preset))
    samples = [(prompt, answer(text)) for prompt in prompts() for text in ("17", "3,5,7")]
    scores = torch.tensor(reward(samples))
    model = reward.model
    expected = [
        model.score([[*model.tokenizer(prompt.text + made.text)["input_ids"], 2]], 64)[0]
        for prompt, made in samples
    ]
    assert torch.equal(scores, torch.tensor(expected)), "also among others, bit for bit"
    assert len(set(expected)) == len(samples)
    cut = ModelReward(model, tokens_per_batch=16)
    assert torch.equal(torch.tensor(cut(samples)), scores)


def test_both_templates_render_the_messages_and_the_policys_own_text_is_not_read(
    folder: Path,
) -> None:
    tokenizer: PreTrainedTokenizerFast = build_tokenizer(64)
    tokenizer.chat_template = CHAT
    save_tokenizer(tokenizer, folder)
    reward = load_model_reward(folder, FP32)
    (of_text,), (of_messages,) = prompts(1), prompts(1, "{% for m in messages %}!{% endfor %}")
    assert of_messages.text == "!"
    first, second = reward([(of_text, answer("17")), (of_messages, answer("17"))])
    assert first == second


def test_what_is_too_long_or_not_finite_is_nan_and_the_others_keep_their_scores(
    folder: Path,
) -> None:
    reward = load_model_reward(folder, FP32)
    (prompt,) = prompts(1)
    (alone,) = reward([(prompt, answer("17"))])
    scores = reward([(prompt, answer("9" * 70)), (prompt, answer("17"))])
    assert math.isnan(scores[0])
    assert scores[1] == alone
    reward.model.policy.weights("training").plain["score.weight"][:] = math.nan
    assert math.isnan(reward([(prompt, answer("17"))])[0])
    assert reward([]) == []
