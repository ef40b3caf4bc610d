"""Log-probabilities of given tokens are those that were recorded when the tokens were drawn, and
those of the training forward.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from isobit.config.precision import Preset
from isobit.config.rollout import RolloutConfig
from isobit.memory.cache_size import pages_for
from isobit.models.policy import Policy
from isobit.models.scorer import Scorer
from isobit.records.packing import lay_end_to_end
from isobit.records.text import Completion
from isobit.rollout.engine import generate
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Request
from isobit.rollout.scoring import Scored, Scoring, TokenScorer
from isobit.util.errors import NonFiniteError, RequestError
from tests.rollout.test_exactness import TIGHT, TINY, policy_of, requests


def scored(policy: Policy, wanted: Sequence[Scoring], tokens: int) -> list[Scored]:
    """All of them, in forwards of so many tokens."""
    scorer = TokenScorer[int](policy, tokens)
    for place, one in enumerate(wanted):
        scorer.add(place, one)
    found: dict[int, Scored] = {}
    while scorer.has_work:
        found |= scorer.step()
    assert scorer._allocator.num_free == scorer._allocator.num_pages
    return [found[place] for place in range(len(wanted))]


def drawn(policy: Policy, asked: list[Request]) -> list[tuple[Request, Completion]]:
    groups = generate(NativeEngine(policy, RolloutConfig(**TIGHT), None, 0), asked)
    return [(one, made) for one, group in zip(asked, groups, strict=True) for made in group]


def scoring_of(request: Request, completion: Completion, alternatives: int = 0) -> Scoring:
    ids = request.prompt.token_ids
    temperature = request.sampling.log_prob_temperature
    return Scoring((*ids, *completion.token_ids), len(ids), temperature, alternatives)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("preset", "tokens"), [("fp8", 23), ("fp8", 2048), ("fp8-rollout", 100), ("int8", 100)]
)
def test_drawn_tokens_score_what_was_recorded(preset: Preset, tokens: int) -> None:
    policy = policy_of(preset)
    pairs = [pair for t in (0.7, 0.0) for pair in drawn(policy, requests(t)[::4])]
    found = scored(policy, [scoring_of(*pair, alternatives=3) for pair in pairs], tokens)
    for (request, completion), one in zip(pairs, found, strict=True):
        assert torch.equal(torch.tensor(one.log_probs), torch.tensor(completion.log_probs))
        for token, log_prob, rank, top in zip(
            completion.token_ids, one.log_probs, one.ranks, one.alternatives, strict=True
        ):
            values = [value for _, value in top]
            assert len(top) == 3 and values == sorted(values, reverse=True)
            assert ((token, log_prob) in top) is (rank <= 3)
            assert rank == 1 + sum(value > log_prob for value in values) or rank > 3
            if request.sampling.temperature == 0:
                assert rank == 1


@pytest.mark.few(1)
@pytest.mark.parametrize("preset", ["fp8", "int8"])
def test_prompts_score_what_training_computes(preset: Preset) -> None:
    policy = policy_of(preset)
    completions = [completion for _, completion in drawn(policy, requests())]
    for completion in completions[::5]:
        batch = lay_end_to_end([completion.sequence])
        expected = Scorer(policy).score(batch).log_probs
        first = len(completion.sequence.token_ids) - expected.numel()
        ids = tuple(completion.sequence.token_ids.tolist())
        (whole,) = scored(policy, [Scoring(ids, 1, 1.0)], 50)
        assert len(whole.log_probs) == len(ids) - 1
        assert torch.equal(torch.tensor(whole.log_probs)[first - 1 :], expected)


def test_new_weights_begin_again_what_is_half_scored() -> None:
    policy, other = policy_of("fp8"), policy_of("fp8", 1)
    wanted = [Scoring(tuple(range(90)), 1, 1.0)]
    (before,), (expected,) = scored(policy, wanted, 20), scored(other, wanted, 20)
    assert before.log_probs != expected.log_probs
    scorer = TokenScorer[str](policy, 20)
    scorer.add("a", wanted[0])
    assert scorer.step() == []
    kept = {name: master.detach().clone() for name, master in policy.masters.items()}
    try:
        policy.republish({name: master.detach() for name, master in other.masters.items()})
        found: list[tuple[str, Scored]] = []
        while scorer.has_work:
            found += scorer.step()
    finally:
        policy.republish(kept)
    assert found == [("a", expected)]


def test_owners_take_turns_however_much_one_of_them_asks_for() -> None:
    """Whoever comes second waits for what is half done, and not for all that came before."""
    scorer = TokenScorer[tuple[str, int]](policy_of("fp8"), 60)
    for owner, count, length in (("many", 20, 60), ("few", 2, 10), ("other", 2, 60)):
        for place in range(count):
            scoring = Scoring(tuple(range(place, place + length)), 1, 1.0)
            scorer.add((owner, place), scoring, owner)
    order = list[tuple[str, int]]()
    while scorer.has_work:
        order += [key for key, _ in scorer.step()]
    for owner, count in (("many", 20), ("few", 2), ("other", 2)):
        assert [place for one, place in order if one == owner] == [*range(count)], "in their order"
    at_once = scorer._num_pages // pages_for(60, scorer._policy.backend.sizes.page_tokens)
    assert order.index(("few", 1)) <= at_once + 2
    assert order.index(("other", 1)) <= at_once + 5


def test_an_owner_of_much_is_not_held_back_by_ever_new_ones_of_little() -> None:
    scorer, order = TokenScorer[int](policy_of("fp8"), 60), list[int]()
    for place in range(4):
        scorer.add(place, Scoring(tuple(range(60)), 1, 1.0), "much")
    for name in range(100, 130):
        scorer.add(name, Scoring(tuple(range(60)), 1, 1.0), name)
        order += [key for key, _ in scorer.step()]
    assert {0, 1, 2, 3} < {*order} and order.index(3) < 20
    scorer.drop(scorer.keys)
    assert not (scorer.has_work or scorer._next_turns)
    assert not scorer._next_turns


def test_what_is_dropped_holds_nothing() -> None:
    scorer = TokenScorer[int](policy_of("fp8"), 30)
    for place in range(9):
        scorer.add(place, Scoring(tuple(range(80)), 1, 1.0))
    scorer.step()
    assert scorer._allocator.num_free < scorer._allocator.num_pages
    scorer.drop(range(9))
    assert not scorer.has_work and scorer.keys == []
    assert scorer._allocator.num_free == scorer._allocator.num_pages


@pytest.mark.parametrize(
    ("scoring", "why"),
    [
        (Scoring((5,), 1, 1.0), "none is left to score"),
        (Scoring((5, 6), 0, 1.0), "none is left to score"),
        (Scoring((5,) * (TINY.max_positions + 1), 1, 1.0), "context holds"),
        (Scoring((5, TINY.vocab_size), 1, 1.0), "the distribution holds 0 to"),
        (Scoring((5, -1), 1, 1.0), "the distribution holds 0 to"),
    ],
)
def test_what_cannot_be_scored_is_refused(scoring: Scoring, why: str) -> None:
    scorer = TokenScorer[int](policy_of("fp8"), 30)
    with pytest.raises(RequestError, match=why):
        scorer.add(0, scoring)
    assert not scorer.has_work


def test_logits_that_are_not_finite_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_of("fp8")
    scorer = TokenScorer[int](policy, 30)
    scorer.add(0, Scoring((1, 2, 3), 1, 1.0))
    scorer.add(1, Scoring((1, 2), 1, 1.0))

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        found = torch.zeros(len(hidden), 96)
        found[1, 5] = torch.nan
        return found

    monkeypatch.setattr(scorer._runner, "logits", logits)
    with pytest.raises(NonFiniteError) as said:
        scorer.step()
    assert list(said.value.samples) == [0]


@pytest.mark.exhaustive
def test_a_seed_draws_the_same_under_any_name_and_in_any_company() -> None:
    """Two requests of one seed are live together, which two of one name could not be."""
    policy = policy_of("fp8")
    seeded = [replace(one, seed=11) for one in requests()]
    plain = [replace(one, visit=1) for one in requests()]
    renamed = [
        replace(one, prompt=replace(one.prompt, id=f"other/{place}"), visit=3)
        for place, one in enumerate(seeded)
    ]
    groups = generate(
        NativeEngine(policy, RolloutConfig(**TIGHT), None, 0), [*seeded, *plain, *renamed]
    )
    alone = [generate(NativeEngine(policy, RolloutConfig(), None, 5), [one])[0] for one in seeded]
    for mine, unseeded, other, single in zip(
        groups[:5], groups[5:10], groups[10:], alone, strict=True
    ):
        for one, same, again in zip(mine, other, single, strict=True):
            assert one.token_ids == same.token_ids == again.token_ids
            assert one.log_probs == same.log_probs == again.log_probs
        assert [one.token_ids for one in mine] != [one.token_ids for one in unseeded]
        assert len({one.token_ids for one in mine}) > 1
