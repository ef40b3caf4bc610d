"""Reward models: folders that transformers reads and writes, scores that are those of transformers
and do not depend on what else is scored.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForSequenceClassification,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from isobit.config.precision import PrecisionConfig
from isobit.config.shape import Family
from isobit.errors import ModelError
from isobit.models.config import ModelConfig
from isobit.models.folder import load_policy, read_reward_config, read_reward_masters, reward_config
from isobit.models.policy import Policy, random_policy
from isobit.models.reward_model import load_reward_model, without_padding
from isobit.models.saving import save_policy
from isobit.models.shards import WEIGHTS_FILE
from isobit.starter import starter_folder
from tools.starter.build import save_tokenizer
from tools.starter.tokenizer import PAD_ID, build_tokenizer

FP32 = PrecisionConfig(preset="fp32")
CONFIGS = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}
FAMILIES: list[Family] = ["llama", "mistral", "qwen2", "qwen3"]
LENGTHS = (5, 70, 1, 33, 128, 129, 17)


def make_config(family: Family = "qwen3", **changes: Any) -> ModelConfig:
    shape = {
        "vocab_size": 128,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 64,
        "max_positions": 256,
        "rms_epsilon": 1e-6,
        "rope_theta": 1e4,
        "tied_embeddings": False,
        "score_head": True,
        "pad_token_id": PAD_ID,
    }
    return ModelConfig(family, **(shape | changes))


def make_folder(folder: Path, config: ModelConfig) -> Path:
    """A random reward model in BF16, scores about 1 apart, with the starter's tokenizer."""
    policy = random_policy(config, FP32, seed=1)
    with torch.no_grad():
        for name, master in policy.masters.items():
            noise = torch.randn_like(master) * (1.0 if name == "score.weight" else 0.08)
            master.add_(noise).copy_(master.bfloat16())
    policy.publish()
    save_policy(policy, folder)
    save_tokenizer(build_tokenizer(config.max_positions), folder)
    return folder


def sequences(seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 128, (n,), generator=generator).tolist() for n in LENGTHS]


def theirs(model: PreTrainedModel, ids: Sequence[Sequence[int]], side: str) -> list[float]:
    """transformers' scores of one padded batch."""
    longest = max(map(len, ids))
    rows, mask = [], []
    for one in ids:
        padding, real = [PAD_ID] * (longest - len(one)), [1] * len(one)
        left = side == "left"
        rows.append([*padding, *one] if left else [*one, *padding])
        mask.append([*[0] * len(padding), *real] if left else [*real, *[0] * len(padding)])
    given = torch.tensor(mask)
    positions = (given.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        scores = model(
            input_ids=torch.tensor(rows), attention_mask=given, position_ids=positions
        ).logits
    return scores[:, 0].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_the_folder_and_gives_the_same_scores(
    family: Family, tmp_path: Path
) -> None:
    make_folder(tmp_path, make_config(family))
    ours = load_reward_model(tmp_path, FP32).score(sequences(), 4096)
    model = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, dtype=torch.float32, local_files_only=True
    )
    assert type(model).__name__ == f"{family.capitalize()}ForSequenceClassification"
    assert (model.config.num_labels, model.config.pad_token_id) == (1, PAD_ID)
    assert max(ours) - min(ours) > 1, "scores that hardly differ would show nothing"
    for side in ("right", "left"):
        assert theirs(model, sequences(), side) == pytest.approx(ours, abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_of_transformers_is_read_as_it_is_and_written_back(
    family: Family, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    config = CONFIGS[family](
        vocab_size=128,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        num_labels=1,
        pad_token_id=PAD_ID,
        initializer_range=0.2,
    )
    made = AutoModelForSequenceClassification.from_config(config)
    made.bfloat16().save_pretrained(tmp_path / "theirs")
    model = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "theirs", dtype=torch.float32, local_files_only=True
    )
    save_tokenizer(build_tokenizer(256), tmp_path / "theirs")
    reward_model = load_reward_model(tmp_path / "theirs", FP32)
    assert theirs(model, sequences(), "right") == pytest.approx(
        reward_model.score(sequences(), 4096), abs=1e-4
    )
    read = read_reward_config(tmp_path / "theirs")
    masters = read_reward_masters(tmp_path / "theirs", read, seed=0)
    save_policy(Policy(read, FP32, masters), tmp_path / "ours")
    assert read_reward_config(tmp_path / "ours") == read
    ours, original = (load_file(tmp_path / name / WEIGHTS_FILE) for name in ("ours", "theirs"))
    assert ours.keys() == original.keys()
    assert all(torch.equal(ours[name], original[name]) for name in ours)
    assert ours["score.weight"].shape == (1, 128)


def test_the_score_is_that_of_the_last_token_that_is_no_padding(tmp_path: Path) -> None:
    """Also inside a sequence of its own: transformers looks at the ids alone."""
    make_folder(tmp_path, make_config())
    given = [[5, 6, 7], [5, 6, 7, PAD_ID, PAD_ID], [5, PAD_ID, 7], [PAD_ID, PAD_ID], [PAD_ID]]
    scores = load_reward_model(tmp_path, FP32).score(given, 4096)
    assert scores[0] == scores[1] != scores[2]
    assert scores[3] == scores[4]
    model = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, dtype=torch.float32, local_files_only=True
    )
    with torch.no_grad():
        expected = [float(model(input_ids=torch.tensor([ids])).logits) for ids in given]
    assert expected == pytest.approx(scores, abs=1e-4)
    assert list(without_padding([3, 0, 0], None)) == [3, 0, 0]


@pytest.mark.parametrize("preset", ["fp32", "bf16", "fp8"])
def test_a_score_does_not_depend_on_neighbours_order_or_packing(
    preset: str, tmp_path: Path
) -> None:
    make_folder(tmp_path, make_config())
    model = load_reward_model(tmp_path, PrecisionConfig.model_validate(preset))
    given = sequences()
    together = torch.tensor(model.score(given, 4096))
    assert len(set(together.tolist())) == len(given)
    alone = torch.tensor([model.score([ids], 4096)[0] for ids in given])
    cut = torch.tensor(model.score(given, 150))
    backwards = torch.tensor(model.score(given[::-1], 4096)[::-1])
    among_others = torch.tensor(model.score([*sequences(1), *given], 4096)[len(given) :])
    for scores in (alone, cut, backwards, among_others):
        assert torch.equal(scores, together)


def test_fp8_scores_are_near_those_of_fp32(tmp_path: Path) -> None:
    make_folder(tmp_path, make_config())
    exact, bf16, fp8 = (
        torch.tensor(
            load_reward_model(tmp_path, PrecisionConfig.model_validate(preset)).score(
                sequences(), 4096
            )
        )
        for preset in ("fp32", "bf16", "fp8")
    )
    spread = float(exact.std())
    assert 0 < float((bf16 - exact).abs().max()) < 0.1 * spread
    assert float((bf16 - exact).norm()) < float((fp8 - exact).norm()) < 0.5 * spread * 7**0.5


def test_it_keeps_a_byte_a_linear_weight_and_no_lm_head(tmp_path: Path) -> None:
    config = make_config()
    policy = load_reward_model(make_folder(tmp_path, config), PrecisionConfig()).policy
    linears = 2 * ((4 + 2 * 2) * 64 * 128 + 128 * 4 * 64 + 3 * 128 * 256)
    others = 128 * 128 + (2 * 2 + 1 + 1) * 128 + 2 * 2 * 64  # embedding, norms, score, q and k
    scales, rope = 4 * linears // 128**2, 4 * 256 * 64
    assert policy.num_bytes == linears + scales + 2 * others + rope
    assert policy.decoder.head is None


def test_a_language_model_becomes_a_reward_model_with_a_drawn_head() -> None:
    folder = starter_folder()
    config = reward_config(folder, PAD_ID)
    assert config.score_head and config.pad_token_id == PAD_ID
    first, again, other = (
        cast(dict[str, torch.Tensor], dict(read_reward_masters(folder, config, seed)))
        for seed in (0, 0, 1)
    )
    assert list(first)[-1] == "score.weight" and "lm_head.weight" not in first
    trunk = load_policy(folder, FP32).masters
    assert all(torch.equal(first[name], master) for name, master in trunk.items())
    assert torch.equal(first["score.weight"], again["score.weight"])
    assert not torch.equal(first["score.weight"], other["score.weight"])
    assert float(first["score.weight"].std()) == pytest.approx(129**-0.5, rel=0.2)


def test_the_one_kind_in_the_place_of_the_other_is_refused_with_the_way_out(
    tmp_path: Path,
) -> None:
    make_folder(tmp_path, make_config())
    with pytest.raises(ModelError, match=r"is a reward model.*no lm_head.*\[reward\] model"):
        load_policy(tmp_path, FP32)
    with pytest.raises(
        ModelError, match=r"is a language model: it has no score.weight.*isobit sft"
    ):
        load_reward_model(starter_folder(), FP32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_labels": 3, "id2label": {"0": "a", "1": "b", "2": "c"}},
            r"num_labels = 3 is not supported; a reward model gives one score",
        ),
        ({"num_labels": None, "id2label": {"0": "a", "1": "b"}}, "num_labels = 2"),
        ({"num_labels": None, "id2label": None}, "num_labels = 2"),
        ({"architectures": ["BertForSequenceClassification"]}, "BertForSequenceClassification"),
    ],
)
def test_what_is_no_reward_model_is_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make_folder(tmp_path, make_config())
    config = json.loads((tmp_path / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(
        json.dumps({name: value for name, value in config.items() if value is not None})
    )
    with pytest.raises(ModelError, match=message):
        load_reward_model(tmp_path, FP32)


def test_the_labels_are_counted_where_their_number_is_not_written(tmp_path: Path) -> None:
    make_folder(tmp_path, make_config())
    config = json.loads((tmp_path / "config.json").read_text())
    del config["num_labels"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_reward_config(tmp_path) == make_config()


def test_missing_and_superfluous_tensors_are_named(tmp_path: Path) -> None:
    file = make_folder(tmp_path, make_config()) / WEIGHTS_FILE
    tensors = load_file(file)
    save_file(tensors | {"score.bias": torch.zeros(1)}, file)
    with pytest.raises(ModelError, match=r"holds score\.bias"):
        load_reward_model(tmp_path, FP32)
    del tensors["score.weight"]
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"the first is score\.weight"):
        load_reward_model(tmp_path, FP32)


def test_a_token_that_the_model_does_not_know_is_refused(tmp_path: Path) -> None:
    model = load_reward_model(make_folder(tmp_path, make_config()), FP32)
    with pytest.raises(ModelError, match="gives the token 128, but the model knows 0 to 127"):
        model.score([[3, 128]], 4096)
