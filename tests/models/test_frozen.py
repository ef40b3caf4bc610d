"""A frozen model scores with the policy's own bits while its bytes are the policy's, and knows
whether they are.

Reward models: folders that transformers reads and writes, scores that are those of transformers
and do not depend on what else is scored.
"""

import json
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSequenceClassification

from isobit.config.model_shape import Family
from isobit.config.precision import PrecisionConfig, Preset
from isobit.models.config import ModelConfig
from isobit.models.decoder import Scorable
from isobit.models.folder import load_policy, read_reward_config, read_reward_masters, reward_config
from isobit.models.frozen import FrozenPolicy, load_reward_model, without_padding
from isobit.models.policy import Policy, random_policy
from isobit.models.safetensors import WEIGHTS_FILE
from isobit.models.saving import save_policy
from isobit.models.scorer import Scorer
from isobit.precision.quant_tensor import QuantTensor
from isobit.records.batch import PackedBatch
from isobit.starter import starter_folder
from isobit.util.errors import CheckpointError, ModelError
from tests.models.policies import whole_batch
from tools.starter.build import save_tokenizer
from tools.starter.tokenizer import PAD_ID, build_tokenizer

TIED = ModelConfig("qwen3", 64, 128, 256, 2, 4, 2, 64, 128, 1e-6, 1e4, tied_embeddings=True)
SHAPES = {
    "tied": TIED,
    "untied": replace(TIED, tied_embeddings=False),
    "qwen2": replace(TIED, family="qwen2"),
}
PRESETS: list[Preset] = ["fp32", "bf16", "fp8-rollout", "fp8-linear", "fp8", "int8"]
LENGTHS = (9, 4)


def make_policy(preset: Preset = "fp8", shape: str = "tied", seed: int = 0) -> Policy:
    policy = random_policy(SHAPES[shape], PrecisionConfig(preset=preset), seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():  # norms that are not 1, biases that are not 0
        for master in policy.parameters():
            master.add_(torch.randn(master.shape, generator=generator).mul_(0.1))
    policy.publish()
    return policy


def batch() -> PackedBatch:
    ids = torch.randint(64, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    return whole_batch(ids, LENGTHS, ids.roll(-1))


def log_probs(model: Scorable) -> torch.Tensor:
    return Scorer(model).score(batch()).log_probs


def move(policy: Policy, by: float = 0.05) -> None:
    """An update that every matrix notices."""
    with torch.no_grad():
        for master in policy.parameters():
            master.add_(torch.randn_like(master).mul_(by))
    policy.publish()


def masters_of(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: master.detach() for name, master in policy.masters.items()}


@pytest.mark.few(4)
@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("preset", PRESETS)
def test_log_probs_are_the_policys_until_it_moves_and_again_when_it_is_taken(
    preset: Preset, shape: str
) -> None:
    policy = make_policy(preset, shape)
    published = FrozenPolicy.publish(
        policy.config, PrecisionConfig(preset=preset), masters_of(policy)
    )
    copied, first = FrozenPolicy.of(policy), log_probs(policy)
    for frozen in (published, copied):
        assert frozen.is_equal_to(policy)
        assert torch.equal(log_probs(frozen), first)
    move(policy)
    for frozen in (published, copied):
        assert not frozen.is_equal_to(policy)
        assert torch.equal(log_probs(frozen), first), "it does not follow the policy"
    assert not torch.equal(log_probs(policy), first)
    copied.take(policy)
    assert copied.is_equal_to(policy) and not published.is_equal_to(policy)
    assert torch.equal(log_probs(copied), log_probs(policy))


def test_only_the_training_side_is_held_and_each_tensor_once() -> None:
    policy = make_policy("fp8-rollout")
    flow = PrecisionConfig(preset="fp8-rollout")
    published = FrozenPolicy.publish(TIED, flow, masters_of(policy))
    for frozen in (FrozenPolicy.of(policy), published):
        for linear in frozen.weights("training").linears.values():
            assert isinstance(linear.matrix, torch.Tensor)
            assert linear.matrix.dtype == torch.bfloat16
        with pytest.raises(AssertionError, match="only scores"):
            frozen.weights("rollout")
    linears = FrozenPolicy.of(make_policy("fp8")).weights("training").linears
    assert all(isinstance(linear.matrix, QuantTensor) for linear in linears.values())


def test_a_publication_that_changes_no_byte_leaves_them_equal() -> None:
    policy = make_policy()
    frozen = FrozenPolicy.of(policy)
    policy.publish()
    assert policy.version == 3 and frozen.is_equal_to(policy)
    with torch.no_grad():
        policy.masters["norm.weight"][5] *= 1 + 2.0**-12  # less than BF16 can show
    policy.publish()
    assert frozen.is_equal_to(policy)


@pytest.mark.parametrize(
    "name",
    ["norm.weight", "layers.0.qkv_proj.bias", "embed_tokens.weight", "layers.1.down_proj.weight"],
)
def test_one_changed_number_or_scale_makes_them_differ(name: str) -> None:
    policy = make_policy(shape="qwen2")
    frozen = FrozenPolicy.of(policy)
    with torch.no_grad():
        if "down_proj" in name:
            policy.masters[name].mul_(2)
        else:
            policy.masters[name].view(-1)[3] += 0.5
    policy.publish()
    assert policy.change.share == 0, "the linears' values are as they were"
    assert not frozen.is_equal_to(policy)


def test_bytes_are_compared_once_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    from isobit.models import frozen as module

    policy, asked = make_policy(), []
    same_bytes = module._same_bytes
    monkeypatch.setattr(
        module, "_same_bytes", lambda *tensors: asked.append(1) or same_bytes(*tensors)
    )
    frozen = FrozenPolicy.of(policy)
    assert frozen.is_equal_to(policy) and not asked, "nothing was published since it was taken"
    move(policy)
    assert not frozen.is_equal_to(policy) and not frozen.is_equal_to(policy)
    assert len(asked) == 1
    assert frozen.is_equal_to(make_policy()), "another policy is another question"


def test_another_function_is_never_equal_however_equal_its_bytes() -> None:
    policy = make_policy()
    masters, precision = masters_of(policy), PrecisionConfig(preset="fp8")
    other = replace(TIED, rope_theta=5e3)
    assert not FrozenPolicy.publish(other, precision, masters).is_equal_to(policy)
    linear = PrecisionConfig(preset="fp8-linear")
    assert not FrozenPolicy.publish(TIED, linear, masters).is_equal_to(policy)
    assert FrozenPolicy.publish(TIED, precision, masters).is_equal_to(policy)


def test_a_folder_is_read_one_master_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from isobit.models import frozen as module

    policy = make_policy(shape="untied")
    save_policy(policy, tmp_path)
    read: list[weakref.ref[Any]] = []
    read_masters = module.read_masters

    def watched(folder: Path, config: ModelConfig, device: torch.device | str) -> Any:
        for name, master in read_masters(folder, config, device):
            assert sum(before() is not None for before in read) < 2
            read.append(weakref.ref(master))
            yield name, master

    monkeypatch.setattr(module, "read_masters", watched)
    frozen = FrozenPolicy.load(tmp_path, PrecisionConfig(preset="fp8"))
    assert len(read) == len(policy.masters)
    loaded = load_policy(tmp_path, PrecisionConfig(preset="fp8"))
    assert frozen.is_equal_to(loaded) and torch.equal(log_probs(frozen), log_probs(loaded))
    with pytest.raises(ModelError, match="not a folder"):
        FrozenPolicy.load(tmp_path / "none", PrecisionConfig(preset="fp8"))


@pytest.mark.few(8)
@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("preset", ["bf16", "fp8", "int8"])
def test_tensors_put_another_one_where_this_one_was(preset: Preset, shape: str) -> None:
    policy, other = make_policy(preset, shape), make_policy(preset, shape, seed=7)
    frozen, restored = FrozenPolicy.of(policy), FrozenPolicy.of(other)
    assert frozen.digest() != restored.digest()
    assert not restored.is_equal_to(policy)
    restored.restore({name: tensor.clone() for name, tensor in frozen.tensors().items()})
    assert restored.is_equal_to(policy) and not restored.is_equal_to(other)
    assert restored.digest() == frozen.digest()
    assert torch.equal(log_probs(restored), log_probs(policy)), "lm_head's own form is there too"


def test_tensors_of_another_model_are_refused_by_name() -> None:
    frozen = FrozenPolicy.of(make_policy())
    tensors = frozen.tensors()
    assert {"layers.0.qkv_proj.weight", "layers.0.qkv_proj.weight.scales"} < tensors.keys()
    missing = {name: x for name, x in tensors.items() if name != "norm.weight"}
    refused: list[tuple[dict[str, torch.Tensor], str]] = [
        (missing, "norm.weight is only in the model"),
        ({**tensors, "lm_head.weight": torch.zeros(1)}, "lm_head.weight is only in the checkpoint"),
        ({**tensors, "norm.weight": torch.zeros(128)}, r"norm.weight is torch.float32 of \(128,\)"),
        ({**tensors, "norm.weight": torch.zeros(64).bfloat16()}, r"of \(64,\), and the model has"),
    ]
    for found, message in refused:
        with pytest.raises(CheckpointError, match=message):
            frozen.restore(found)


def test_the_digest_is_of_the_published_bytes() -> None:
    policy = make_policy()
    frozen = FrozenPolicy.of(policy)
    first = frozen.digest()
    assert FrozenPolicy.of(policy).digest() == first
    with torch.no_grad():
        policy.masters["layers.1.down_proj.weight"].mul_(2)
    policy.publish()
    assert frozen.digest() == first
    frozen.take(policy)
    assert frozen.digest() != first, "scales count"


def test_offloaded_weights_are_on_the_device_only_while_they_score(
    own_memory: Callable[[], Any],
) -> None:
    policy = make_policy(shape="qwen2")
    own_memory()
    frozen, first = FrozenPolicy.of(policy), log_probs(policy)
    digest, before = frozen.digest(), frozen.num_bytes
    frozen.offload()
    (buffer,) = storages(frozen)
    with frozen.on_device():
        assert buffer not in storages(frozen)
        with frozen.on_device():
            assert buffer not in storages(frozen)
        assert torch.equal(log_probs(frozen), first)
        with pytest.raises(AssertionError, match="for a while"):
            frozen.take(policy)
    assert storages(frozen) == {buffer}, "nothing is left on the device"
    assert frozen.is_equal_to(policy) and frozen.num_bytes == before
    move(policy)
    assert not frozen.is_equal_to(policy) and frozen.digest() == digest
    frozen.take(policy)
    assert storages(frozen) == {buffer}
    with frozen.on_device():
        assert torch.equal(log_probs(frozen), log_probs(policy))
    other = FrozenPolicy.of(make_policy(shape="qwen2", seed=3))
    frozen.restore(other.tensors())
    with frozen.on_device():
        assert torch.equal(log_probs(frozen), log_probs(other))


def test_a_cpu_has_nowhere_else_to_put_them() -> None:
    frozen = FrozenPolicy.of(make_policy())
    before = storages(frozen)
    frozen.offload()
    with frozen.on_device():
        assert storages(frozen) == before


def storages(frozen: FrozenPolicy) -> set[int]:
    weights = frozen.weights("training")
    tensors = [*frozen.tensors().values(), *weights.plain.values(), weights.rope.cos]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def test_a_value_head_is_the_policys_own_business() -> None:
    """PPO's critic is no part of the function that a policy is held to."""
    critic = replace(TIED, value_head=True)
    policy = random_policy(critic, PrecisionConfig(preset="fp8"), 0)
    frozen = FrozenPolicy.of(policy)
    plain = FrozenPolicy.of(random_policy(TIED, PrecisionConfig(preset="fp8"), 0))
    assert not any("value" in name for name in frozen.tensors())
    assert frozen.config == TIED and frozen.digest() == plain.digest()
    assert plain.is_equal_to(policy)
    with torch.no_grad():
        policy.masters["value_head.weight"].add_(1)
    policy.publish()
    assert frozen.is_equal_to(policy) and torch.equal(log_probs(frozen), log_probs(policy))
    move(policy)
    assert not plain.is_equal_to(policy)
    plain.take(policy)
    assert plain.is_equal_to(policy) and torch.equal(log_probs(plain), log_probs(policy))


def test_a_reward_model_has_no_lm_head(own_memory: Callable[[], Any]) -> None:
    judge = replace(TIED, score_head=True)
    policy = random_policy(judge, PrecisionConfig(preset="fp8"), 0)
    own_memory()
    precision, masters = PrecisionConfig(preset="fp8"), masters_of(policy)
    frozen = FrozenPolicy.publish(judge, precision, masters)
    expected = Scorer(policy).score(batch()).values
    assert expected is not None and frozen.is_equal_to(policy)
    frozen.offload()
    frozen.restore({name: tensor.clone() for name, tensor in frozen.tensors().items()})
    with frozen.on_device():
        found = Scorer(frozen).score(batch())
    assert found.values is not None and torch.equal(found.values, expected)
    assert found.log_probs.numel() == 0


FP32 = PrecisionConfig(preset="fp32")
FAMILIES: list[Family] = ["llama", "mistral", "qwen2", "qwen3", "phi3", "olmo3", "gemma3_text"]
LENGTHS_REWARD_MODEL = (5, 70, 1, 33, 128, 129, 17)


def make_config(family: Family = "qwen3") -> ModelConfig:
    config = ModelConfig(family, 128, 128, 256, 2, 4, 2, 64, 256, 1e-6, 1e4, False)
    return replace(config, score_head=True, pad_token_id=PAD_ID)


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
    return [torch.randint(1, 128, (n,), generator=generator).tolist() for n in LENGTHS_REWARD_MODEL]


def theirs(model: Any, ids: Sequence[Sequence[int]], side: str) -> list[float]:
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


@pytest.mark.few(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_the_folder_and_gives_the_same_scores(
    family: Family, tmp_path: Path
) -> None:
    make_folder(tmp_path, make_config(family))
    ours = load_reward_model(tmp_path, FP32).score(sequences(), 4096)
    model = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, dtype=torch.float32, local_files_only=True
    )
    assert (
        type(model).__name__.lower()
        == f"{family.replace('_', '')}ForSequenceClassification".lower()
    )
    assert (model.config.num_labels, model.config.pad_token_id) == (1, PAD_ID)
    assert max(ours) - min(ours) > 1, "scores that hardly differ would show nothing"
    for side in ("right", "left"):
        assert theirs(model, sequences(), side) == pytest.approx(ours, abs=1e-4)


@pytest.mark.few(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_of_transformers_is_read_as_it_is_and_written_back(
    family: Family, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    config = AutoConfig.for_model(
        family,
        **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 128),
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"head_dim": 32, "max_position_embeddings": 256, "initializer_range": 0.2},
        **{"num_labels": 1, "pad_token_id": PAD_ID},
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


@pytest.mark.few(1)
@pytest.mark.parametrize("preset", ["fp32", "bf16", "fp8", "int8"])
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
    flows = (PrecisionConfig(preset=preset) for preset in ("fp32", "bf16", "fp8"))
    models = [load_reward_model(tmp_path, flow) for flow in flows]
    exact, bf16, fp8 = (torch.tensor(model.score(sequences(), 4096)) for model in models)
    spread = float(exact.std())
    assert 0 < float((bf16 - exact).abs().max()) < 0.1 * spread
    assert float((bf16 - exact).norm()) < float((fp8 - exact).norm()) < 0.5 * spread * 7**0.5


def test_it_keeps_a_byte_a_linear_weight_and_no_lm_head(tmp_path: Path) -> None:
    config = make_config()
    policy = load_reward_model(make_folder(tmp_path, config), PrecisionConfig(preset="fp8")).policy
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


def test_the_one_kind_in_the_place_of_the_other_is_refused_with_the_way_out(tmp_path: Path) -> None:
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
        ({"num_labels": 3, "id2label": {"0": "a", "1": "b", "2": "c"}}, "num_labels = 3 is not"),
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


def test_tensors_and_tokens_that_do_not_fit_are_named(tmp_path: Path) -> None:
    file = make_folder(tmp_path, make_config()) / WEIGHTS_FILE
    tensors, model = load_file(file), load_reward_model(tmp_path, FP32)
    with pytest.raises(ModelError, match="gives the token 128, but the model knows 0 to 127"):
        model.score([[3, 128]], 4096)
    save_file(tensors | {"score.bias": torch.zeros(1)}, file)
    with pytest.raises(ModelError, match=r"holds score\.bias"):
        load_reward_model(tmp_path, FP32)
    del tensors["score.weight"]
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"the first is score\.weight"):
        load_reward_model(tmp_path, FP32)
