"""A token that leaves a mask, a sample that leaves a step, and an engine that counts otherwise."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from isobit.cli.main import main
from isobit.config.load import dump_config
from isobit.config.recipes import RunConfig
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Group, Prompt
from isobit.records.wire import groups_of, groups_value
from isobit.rollout.sequence import Sample
from isobit.run.loop import train
from isobit.training import step
from isobit.training.advantage_estimator import sequences_learnt_from
from isobit.training.token_count import check_learnt, check_sampled
from isobit.util.errors import MismatchError

MakeConfig = Callable[..., RunConfig]
PROMPT = Prompt("train/7", "1+1=", (1, 2, 3))


def sequence_of(drawn: int | None = 4) -> TokenSequence:
    """Two turns of two tokens around a result."""
    log_probs = [-1.0, -1.0, -1.0, -1.0]
    versions = [1, 1, 1, 1]
    return TokenSequence.of_answer(
        (1, 2, 3), (4, 5, 9, 9, 6, 7), log_probs, versions, given=[(5, 7)], drawn=drawn
    )


def group_of(*sequences: TokenSequence) -> Group:
    group = Group(PROMPT, 2, [Completion(one, "", "stop") for one in sequences])
    group.rewards, group.advantages = [1.0] * len(sequences), [0.5] * len(sequences)
    return group


def without(sequence: TokenSequence, place: int) -> TokenSequence:
    mask = sequence.loss_mask.copy()
    mask[place] = False
    return replace(sequence, loss_mask=mask)


def test_masks_that_hold_what_was_drawn_pass() -> None:
    group = group_of(sequence_of(), sequence_of())
    check_sampled([group], 8)
    check_learnt([group], [sequences_learnt_from([group]), [sequence_of()]])
    check_sampled([group_of(sequence_of(None))], 99)


@pytest.mark.parametrize("place", [3, 4, 7, 8])
def test_a_token_outside_of_its_mask_names_the_sample(place: int) -> None:
    group = group_of(sequence_of(), without(sequence_of(), place))
    match = r"4 tokens were drawn for sample 1 of prompt 'train/7' \(visit 2\), and its .* has 3"
    with pytest.raises(MismatchError, match=match):
        check_sampled([group], 8)
    with pytest.raises(MismatchError, match=match):
        check_learnt([group], [sequences_learnt_from([group])])


def test_a_result_in_the_mask_is_found_too() -> None:
    sequence = sequence_of()
    group = group_of(replace(sequence, loss_mask=np.arange(9) >= 3))
    with pytest.raises(MismatchError, match=r"4 tokens were drawn .* has 6"):
        check_sampled([group], 4)


@pytest.mark.parametrize("generated", [7, 9])
def test_an_engine_that_has_drawn_another_number_is_found(generated: int) -> None:
    with pytest.raises(MismatchError, match=f"{generated} tokens, and 8 are in the 2 samples"):
        check_sampled([group_of(sequence_of(), sequence_of())], generated)


def test_a_sample_that_is_in_no_part_or_in_two_is_named() -> None:
    group = group_of(sequence_of(), sequence_of())
    first, second = sequences_learnt_from([group])
    for parts, times in (([[first]], 0), ([[first, second], [second]], 2)):
        with pytest.raises(MismatchError, match=rf"sample 1 of prompt .* are {times} times"):
            check_learnt([group], parts)
    dropped = replace(group, advantages=[0.5, None])
    check_learnt([dropped], [[first]])
    with pytest.raises(MismatchError, match=r"sample 1 .* are 1 times .* should be 0"):
        check_learnt([dropped], [[first, second]])


def test_the_count_goes_where_the_sequence_goes() -> None:
    sequence = sequence_of()
    assert sequence.with_given([5, 5]).drawn == sequence.with_columns(values=0.0).drawn == 4
    groups = [group_of(sequence, without(sequence, 8), sequence_of(None))]
    value = groups_value(groups)
    (found,) = groups_of(value, lambda _: PROMPT)
    assert [one.sequence.drawn for one in found.completions] == [4, 4, None]
    del value["sequences"]["drawn"]  # of a checkpoint of an earlier version
    (found,) = groups_of(value, lambda _: PROMPT)
    assert [one.sequence.drawn for one in found.completions] == [None] * 3


def lose_the_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn's last token is taken for one that nobody drew."""
    whole = Sample.completion

    def completion(self: Sample, tokenizer: Any) -> Completion:
        self.given = [*self.given, (len(self.tokens) - 1, len(self.tokens))]
        for column in (self.log_probs, self.weights_versions):
            column.pop()
        return whole(self, tokenizer)

    monkeypatch.setattr(Sample, "completion", completion)


def test_a_run_whose_masks_lose_a_token_ends_before_it_learns(
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lose_the_last_token(monkeypatch)
    config = make_config(data={"eval": {}}, check={"on_mismatch": "ignore"})
    recipe = tmp_path / "run.toml"
    recipe.write_text(dump_config(config), encoding="utf-8")
    assert main(["train", str(recipe)]) == MismatchError.exit_code
    assert "tokens were drawn for sample 0 of prompt 'train/" in capsys.readouterr().err
    assert not (config.output / "metrics.jsonl").read_text(encoding="utf-8")


def test_a_run_that_leaves_out_a_group_ends_before_it_learns(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = step.cut_by_prompt
    monkeypatch.setattr(step, "cut_by_prompt", lambda groups, parts: cut(max(0, groups - 1), parts))
    with pytest.raises(MismatchError, match=r"of prompt 'train/\d+' .* are 0 times"):
        train(make_config(data={"eval": {}}))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "sections",
    [
        {"algorithm": {"name": "remax"}},
        {"algorithm": {"truncated": "exclude", "dynamic_sampling": True, "max_refills": 2}},
        {"algorithm": {"truncated": "mask"}, "replay": {"fraction": 0.5}, "async": {"lag": 1}},
    ],
)
def test_what_is_dropped_for_a_reason_is_no_fault(
    sections: dict[str, Any], make_config: MakeConfig, write_reward: Callable[[str], str]
) -> None:
    reward = write_reward("return [0.0, 0.0, 1.0][sum(completion.token_ids) % 3]")
    rollout = {"max_new_tokens": 5, "stop_tokens": list("0123456789")}
    config = make_config(reward, data={"eval": {}}, rollout=rollout, **sections)
    assert train(config).tokens_generated > 0
