"""Samples drawn again from their keys: as they were drawn, and those of other noise."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from isobit.config.precision import Preset
from isobit.config.recipes import RunConfig
from isobit.models.folder import read_config
from isobit.proof.redraw import redraw_some
from isobit.rollout.engine import generate
from isobit.rollout.servers import AskedSamples
from isobit.run.loop import train
from isobit.util.errors import MismatchError
from tests.rollout.served import SEED, native_of, served
from tests.rollout.test_exactness import policy_of, requests


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("preset", "sampling"),
    [("fp8", {}), ("int8", {"top_p": 0.9, "top_k": 20}), ("bf16", {"temperature": 0.0})],
)
def test_what_an_engine_has_drawn_is_drawn_again(preset: Preset, sampling: dict[str, Any]) -> None:
    policy, wanted = policy_of(preset), requests(**sampling)
    made = generate(native_of(policy), wanted)
    assert redraw_some(policy, wanted, made, SEED) is None
    other = redraw_some(policy, wanted, made, SEED + 1)
    assert (other is None) == ("temperature" in sampling), "greedy tokens have no noise"
    swapped = [list(reversed(group)) for group in made]
    if sampling.get("temperature") != 0.0:
        found = redraw_some(policy, wanted, swapped, SEED)
        assert found is not None and "are not what its noise draws: token" in found


def test_tokens_of_other_weights_are_left_out() -> None:
    policy, wanted = policy_of("fp8"), requests()
    made = generate(native_of(policy), wanted)
    older = [
        [
            replace(one, sequence=one.sequence.with_columns(weights_versions=[99] * one.length))
            for one in group
        ]
        for group in made
    ]
    assert redraw_some(policy, wanted, older, SEED + 1) is None


@pytest.mark.parametrize("action", ["auto", "warn"])
def test_a_run_whose_server_takes_other_noise_is_told_of(
    action: str,
    make_config: Callable[..., RunConfig],
    tiny_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each sample gets the noise of the next one of its prompt."""
    body = AskedSamples.body

    def shifted(self: AskedSamples) -> dict[str, Any]:
        return body(replace(self, keys=[*self.keys[1:], *self.keys[:1]]))

    with served(config=read_config(tiny_folder)) as server:
        rollout = {"max_new_tokens": 5, "engine": "http", "servers": [server]}
        sections = {"data": {"eval": {}}, "rollout": rollout, "training": {"steps": 1}}
        config = make_config(**sections, check={"on_mismatch": action})
        monkeypatch.setattr(AskedSamples, "body", shifted)
        if action == "auto":
            with pytest.raises(MismatchError, match="are not what its noise draws"):
                train(config)
        else:
            assert train(config).tokens_differing == 0
            assert "are not what its noise draws" in capsys.readouterr().out
