"""The divergence of a policy from a teacher, token by token, and its gradient: against autograd in
FP64, exactly 0 for equal models, and whatever else is in the batch.
"""

import math
from dataclasses import replace

import pytest
import torch

from isobit.config.algorithm import KlDirection
from isobit.kernels.spec import sizes
from isobit.models.frozen import FrozenPolicy
from isobit.models.policy import Policy
from isobit.models.scorer import ScoredPass, Scorer
from isobit.models.teacher import Teacher
from isobit.records.batch import PackedBatch
from isobit.util.errors import NonFiniteError
from tests.models.test_packed_pass import (
    FLOWS,
    LENGTHS,
    LEVELS,
    Gradients,
    PlainDecoder,
    error,
    make,
    make_batch,
)

KLS: tuple[KlDirection, ...] = ("forward", "reverse")


def moved(policy: Policy, seed: int = 5) -> FrozenPolicy:
    """A model near the policy, frozen in the same flow."""
    generator = torch.Generator().manual_seed(seed)
    masters = {
        name: master.detach() + 0.05 * torch.randn(master.shape, generator=generator)
        for name, master in policy.masters.items()
    }
    return FrozenPolicy.of(Policy(policy.config, policy.flow, masters, trainable=False))


def taught(policy: Policy, teacher: Teacher, batch: PackedBatch, d: torch.Tensor) -> Gradients:
    """The gradients of the divergences times ``d``; the masters are clean again."""
    scored = ScoredPass(policy, batch, "none", teacher=teacher)
    scored.forward()
    scored.backward(None, d_divergences=d)
    found = {name: master.grad for name, master in policy.masters.items()}
    for master in policy.parameters():
        master.grad = None
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def plain_log_probs(plain: PlainDecoder, batch: PackedBatch) -> torch.Tensor:
    """[N, V] in the decoder's dtype."""
    parts = batch.token_ids.split(list(batch.lengths))
    hidden = torch.cat([plain.hidden_states(ids) for ids in parts])[batch.rows]
    head = plain.masters.get("lm_head.weight", plain.masters["embed_tokens.weight"])
    return (hidden @ head.t() / batch.temperatures.to(head.dtype)[:, None]).log_softmax(-1)


def plain_divergences(
    log_p: torch.Tensor, log_q: torch.Tensor, kl: KlDirection, top_k: int
) -> torch.Tensor:
    """By the definition: over the k likeliest tokens of the teacher, and all others as one."""
    if top_k:
        order = log_q.argsort(-1, descending=True)
        pair = [x.gather(1, order) for x in (log_p, log_q)]
        log_p, log_q = (
            torch.cat([x[:, :top_k], x[:, top_k:].exp().sum(-1, keepdim=True).log()], 1)
            for x in pair
        )
    if kl == "forward":
        log_p, log_q = log_q, log_p
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def plain(
    policy: Policy, other: Policy, kl: KlDirection, top_k: int, dtype: torch.dtype
) -> tuple[torch.Tensor, Gradients]:
    batch, d = make_batch(64)
    decoder = PlainDecoder(policy, dtype)
    log_q = plain_log_probs(PlainDecoder(other, dtype), batch).detach()
    found = plain_divergences(plain_log_probs(decoder, batch), log_q, kl, top_k)
    masters = decoder.masters
    gradients = torch.autograd.grad(found, list(masters.values()), d.to(dtype))
    return found.detach(), dict(zip(masters, gradients, strict=True))


@pytest.mark.few(1)
@pytest.mark.parametrize("top_k", [0, 1, 7, 63])
@pytest.mark.parametrize("kl", KLS)
@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied"])
def test_values_and_gradients_are_those_of_autograd(
    kl: KlDirection, top_k: int, tied: bool
) -> None:
    """Against FP64, with the same formulas in torch's FP32 as the yardstick."""
    policy, other = make("qwen3", FLOWS["fp32"], tied), make("llama", FLOWS["fp32"], tied)
    batch, d = make_batch(64)
    teacher = Teacher(FrozenPolicy.of(other), kl, top_k)
    wanted, gradients = plain(policy, other, kl, top_k, torch.float64)
    rough, yardstick = plain(policy, other, kl, top_k, torch.float32)
    scores = Scorer(policy, teacher).score(batch)
    assert scores.divergences is not None and scores.divergences.dtype == torch.float32
    limit = 3 * float((rough - wanted).abs().max()) + 1e-6
    assert float((scores.divergences - wanted).abs().max()) < limit
    assert float(wanted.max()) > 0.1, "the two models differ"
    ours = taught(policy, teacher, batch, d)
    assert list(ours) == list(gradients)
    for name, gradient in gradients.items():
        assert error(ours[name], gradient) < 3 * error(yardstick[name], gradient) + 1e-6, name


@pytest.mark.few(1)
@pytest.mark.parametrize("kl", KLS)
@pytest.mark.parametrize("flow", ["bf16", "fp8", "int8", "mixed"])
def test_gradients_in_lower_precision_are_near_those(flow: str, kl: KlDirection) -> None:
    policy, other = make("qwen3", FLOWS[flow]), make("llama", FLOWS["bf16"])
    _, wanted = plain(policy, other, kl, 0, torch.float64)
    ours = taught(policy, Teacher(FrozenPolicy.of(other), kl), *make_batch(64))
    for name, gradient in wanted.items():
        cosine = torch.cosine_similarity(ours[name].flatten().double(), gradient.flatten(), 0)
        assert cosine > (0.999 if flow == "bf16" else 0.95), (name, float(cosine))


@pytest.mark.few(2)
@pytest.mark.parametrize("top_k", [0, 7])
@pytest.mark.parametrize("kl", KLS)
@pytest.mark.parametrize("flow", FLOWS)
def test_a_model_is_at_0_from_itself(flow: str, kl: KlDirection, top_k: int) -> None:
    policy = make("qwen3", FLOWS[flow])
    teacher, (batch, d) = Teacher(FrozenPolicy.of(policy), kl, top_k), make_batch(64)
    divergences = Scorer(policy, teacher).score(batch).divergences
    assert divergences is not None and torch.equal(divergences, torch.zeros_like(d))
    for name, gradient in taught(policy, teacher, batch, d).items():
        assert torch.equal(gradient, torch.zeros_like(gradient)), name


@pytest.mark.few(1)
@pytest.mark.parametrize("kl", KLS)
def test_all_tokens_are_the_whole_vocabulary(kl: KlDirection) -> None:
    policy = make("qwen3", FLOWS["fp8"])
    other, (batch, d) = moved(policy), make_batch(64)
    made = [
        (Scorer(policy, teacher).score(batch).divergences, taught(policy, teacher, batch, d))
        for teacher in (Teacher(other, kl, top_k) for top_k in (0, 64, 1000))
    ]
    (whole, gradients), *others = made
    assert whole is not None
    for divergences, found in others:
        assert divergences is not None and torch.equal(divergences, whole)
        assert all(torch.equal(found[name], gradients[name]) for name in gradients)


def test_tokens_as_likely_as_the_last_one_count_by_themselves() -> None:
    """Ties have no order, on no device."""
    policy = make("qwen3", FLOWS["fp32"])
    masters = {name: master.detach().clone() for name, master in policy.masters.items()}
    masters["lm_head.weight"].zero_()
    flat = FrozenPolicy.of(Policy(policy.config, policy.flow, masters, trainable=False))
    batch, _ = make_batch(64)
    found, whole = (
        Scorer(policy, Teacher(flat, "reverse", top_k)).score(batch).divergences for top_k in (3, 0)
    )
    assert found is not None and whole is not None and torch.equal(found, whole)


@pytest.mark.few(1)
@pytest.mark.parametrize("kl", KLS)
@pytest.mark.parametrize("flow", ["bf16", "fp8", "int8"])
def test_a_divergence_depends_on_its_row_alone(
    flow: str, kl: KlDirection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else is in the batch, and however many logits exist at a time."""
    policy, (batch, d) = make("qwen3", FLOWS[flow]), make_batch(64)
    teacher = Teacher(moved(policy), kl, 9)
    whole = Scorer(policy, teacher).score(batch).divergences
    gradients = taught(policy, teacher, batch, d)
    monkeypatch.setattr(sizes, "logits_at_once", 64 * 7)
    again = Scorer(policy, teacher).score(batch).divergences
    assert whole is not None and again is not None and torch.equal(again, whole)
    for name, gradient in taught(policy, teacher, batch, d).items():
        assert error(gradient, gradients[name]) < 1e-2, name
    starts = [sum(LENGTHS[:index]) for index in range(len(LENGTHS))]
    for start, length in zip(starts, LENGTHS, strict=True):
        mine = (batch.rows >= start) & (batch.rows < start + length)
        if not mine.any():
            continue
        alone = replace(
            batch,
            token_ids=batch.token_ids[start : start + length],
            positions=torch.arange(length),
            lengths=(length,),
            rows=batch.rows[mine] - start,
            targets=batch.targets[mine],
            sequence=torch.zeros(int(mine.sum()), dtype=torch.int64),
            temperatures=batch.temperatures[mine],
        )
        found = Scorer(policy, teacher).score(alone).divergences
        assert found is not None and torch.equal(found, whole[mine])


@pytest.mark.few(1)
@pytest.mark.parametrize("kl", KLS)
def test_computing_again_changes_no_bit(kl: KlDirection) -> None:
    policy, (batch, d) = make("qwen3", FLOWS["fp8"], tied=True), make_batch(64)
    teacher, made = Teacher(moved(policy), kl), []
    for level in LEVELS:
        scored = ScoredPass(policy, batch, level, teacher=teacher)
        scores = scored.forward()
        scored.backward(d, d_divergences=d)
        found = [master.grad for master in policy.parameters()]
        for master in policy.parameters():
            master.grad = None
        made.append((scores.divergences, *found))
    for other in made[1:]:
        for mine, theirs in zip(made[0], other, strict=True):
            assert mine is not None and theirs is not None and torch.equal(mine, theirs)


def test_a_teacher_changes_no_other_score() -> None:
    policy, (batch, d) = make("qwen3", FLOWS["fp8"]), make_batch(64)
    with_teacher = Scorer(policy, Teacher(moved(policy), "reverse")).score(batch)
    without = Scorer(policy).score(batch)
    assert torch.equal(with_teacher.log_probs, without.log_probs)
    assert torch.equal(with_teacher.entropies, without.entropies)
    assert without.divergences is None
    plain_pass = ScoredPass(policy, batch, "none")
    plain_pass.forward()
    plain_pass.backward(d)
    wanted = {name: master.grad for name, master in policy.masters.items()}
    for master in policy.parameters():
        master.grad = None
    scored = ScoredPass(policy, batch, "none", teacher=Teacher(moved(policy), "reverse"))
    scored.forward()
    scored.backward(d)
    for name, master in policy.masters.items():
        gradient = wanted[name]
        assert master.grad is not None and gradient is not None
        assert torch.equal(master.grad, gradient), name


def test_gradients_by_log_probabilities_and_divergences_add_up() -> None:
    """As two passes would; a tied table is the one that both add to."""
    policy, (batch, d) = make("qwen3", FLOWS["fp32"], tied=True), make_batch(64)
    teacher = Teacher(moved(policy), "forward")
    parts = taught(policy, teacher, batch, d)
    scored = ScoredPass(policy, batch, "none")
    scored.forward()
    scored.backward(d)
    for name, master in policy.masters.items():
        assert master.grad is not None
        parts[name] = parts[name] + master.grad
        master.grad = None
    both = ScoredPass(policy, batch, "none", teacher=teacher)
    both.forward()
    both.backward(d, d_divergences=d)
    for name, master in policy.masters.items():
        assert master.grad is not None and error(master.grad, parts[name]) < 1e-5, name


def test_rows_that_no_token_has_take_no_part() -> None:
    """The head has 64 rows, and the tokenizer 50 tokens."""
    policy = make("qwen3", FLOWS["bf16"])
    masters = {name: master.detach() for name, master in policy.masters.items()}
    config = replace(policy.config, tokenizer_size=50)
    fewer = Policy(config, policy.flow, masters)
    batch, d = make_batch(50)
    teacher = Teacher(moved(fewer), "reverse")
    first = Scorer(fewer, teacher).score(batch).divergences
    gradient = taught(fewer, teacher, batch, d)["lm_head.weight"]
    assert bool(gradient[:50].any()) and not bool(gradient[50:].any())
    with torch.no_grad():
        fewer.masters["lm_head.weight"][50:].mul_(10)
    fewer.publish()
    again = Scorer(fewer, teacher).score(batch).divergences
    assert first is not None and again is not None and torch.equal(first, again)


def test_what_is_not_finite_is_an_error() -> None:
    policy, (batch, _) = make("qwen3", FLOWS["fp32"]), make_batch(64)
    broken = moved(policy)
    broken.weights("training").lm_head.table[3, 3] = math.inf
    with pytest.raises(NonFiniteError):
        Scorer(policy, Teacher(broken, "reverse")).score(batch)
