"""Algorithms by name: each table of the configuration builds its class.

One's own objective: loaded from a file or a module, and refused with what it lacks.
"""

import re
from pathlib import Path
from typing import get_args

import pytest
import torch

from isobit.algorithms.family import Grpo
from isobit.algorithms.registry import ALGORITHMS, build_algorithm
from isobit.config.algorithm import AlgorithmConfig, CustomConfig, DrGrpoConfig, GrpoConfig
from isobit.config.keys import tag_of
from isobit.util.errors import ConfigError
from tests.algorithms.batches import random_batch
from tests.sequences import answer_of, group_of

KINDS = [kind for kind in get_args(get_args(AlgorithmConfig)[0]) if kind is not CustomConfig]


def test_every_name_of_the_configuration_is_registered() -> None:
    assert set(ALGORITHMS) == {tag_of(kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS, ids=tag_of)
def test_an_algorithm_is_built_with_its_configuration(kind: type[GrpoConfig]) -> None:
    settings = {"loss_mean": "token", "clip_high": 0.4}
    config = kind(**{name: settings[name] for name in settings.keys() & kind.model_fields})
    built = build_algorithm(config, 512)
    assert built == ALGORITHMS[config.name](config)
    assert type(built).__name__.lower() == config.name.replace("_", "")


def test_grpo_is_built_with_its_configuration() -> None:
    config = GrpoConfig(clip_high=0.4)
    assert build_algorithm(config) == Grpo(config)


def test_the_constant_of_a_mean_is_the_longest_completion_unless_set() -> None:
    assert build_algorithm(DrGrpoConfig(), 512) == build_algorithm(DrGrpoConfig(loss_constant=512))
    built = build_algorithm(DrGrpoConfig(loss_constant=7), 512)
    assert built == build_algorithm(DrGrpoConfig(loss_constant=7), 9)


ROOT = Path(__file__).parents[2]
WHOLE = """
class Mine:
    needs_values = False
    needs_greedy = True

    def __init__(self, power=1):
        self.power = power

    def credit(self, groups):
        return [[None for _ in group.samples] for group in groups]

    def shares(self, batches):
        return []

    def loss(self, scores, batch, shares):
        raise NotImplementedError

class Other:
    pass
"""


def config_of(folder: Path, text: str, name: str = "Mine", **options: object) -> CustomConfig:
    path = folder / "mine.py"
    path.write_text(text, encoding="utf-8")
    return CustomConfig(source=f"{path}:{name}", options=options)


def test_a_class_from_a_file_is_made_with_its_options(tmp_path: Path) -> None:
    found = build_algorithm(config_of(tmp_path, WHOLE, power=3))
    assert (type(found).__name__, vars(found)) == ("Mine", {"power": 3})
    assert found.needs_greedy


def test_a_class_from_a_module_is_made_with_its_options() -> None:
    source = f"{Grpo.__module__}:Grpo"
    config = GrpoConfig()
    found = build_algorithm(CustomConfig(source=source, options={"config": config}))
    assert found == Grpo(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([("def credit(self, groups)", "def credits(self, groups)")], "credit(groups) is missing"),
        (
            [("def loss(self, scores, batch, shares)", "def loss(self, scores, batch)")],
            "loss(scores, batch, shares) is called, but it is loss(scores, batch)",
        ),
        ([("    needs_values = False\n", "")], "needs_values is missing; set it to True or False"),
        (
            [("def shares(self, batches)", "def parts(self)"), ("needs_greedy", "greedy")],
            "shares(batches) is missing; needs_greedy is missing; set it to True or False",
        ),
    ],
)
def test_what_is_no_algorithm_is_refused_with_what_it_lacks(
    tmp_path: Path, changes: list[tuple[str, str]], message: str
) -> None:
    text = WHOLE
    for old, new in changes:
        text = text.replace(old, new)
    with pytest.raises(ConfigError, match=re.escape(f"mine.py:Mine is no algorithm: {message} (")):
        build_algorithm(config_of(tmp_path, text))


def test_what_cannot_be_loaded_is_refused_in_a_line(tmp_path: Path) -> None:
    def refused(config: CustomConfig, message: str) -> None:
        with pytest.raises(ConfigError, match=re.escape(message)) as caught:
            build_algorithm(config)
        assert "\n" not in str(caught.value)

    refused(config_of(tmp_path, "1 / 0"), "mine.py fails on import: ZeroDivisionError: division")
    refused(config_of(tmp_path, WHOLE, "Mime"), "did you mean Mine?")
    refused(config_of(tmp_path, WHOLE, "Mime"), "its classes are Mine, Other")
    refused(config_of(tmp_path, WHOLE, power=1, strength=2), "unexpected keyword argument")
    refused(CustomConfig(source="nowhere.py:Mine"), "there is no file nowhere.py")
    refused(CustomConfig(source="no_such_module:Mine"), "ModuleNotFoundError")
    refused(CustomConfig(source="mine.py"), "expected 'path/to/file.py:Class' or 'module:Class'")


def test_credit_by_turn_is_refused_to_one_that_needs_more_than_rewards(tmp_path: Path) -> None:
    rewards_alone = WHOLE.replace("needs_greedy = True", "needs_greedy = False")
    values = rewards_alone.replace("needs_values = False", "needs_values = True")
    for text, is_refused in ((WHOLE, True), (values, True), (rewards_alone, False)):
        config = config_of(tmp_path, text).model_copy(update={"credit": "turn"})
        if not is_refused:
            assert not build_algorithm(config).needs_greedy
            continue
        with pytest.raises(ConfigError, match=r"credit is 'turn', but .*needs values or a greedy"):
            build_algorithm(config)


def test_the_example_of_the_page_learns_as_it_says(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    found = build_algorithm(config_of(tmp_path, text, "Sapo", temperature=2.0))
    groups = [group_of([answer_of(2)] * 2, [0.0, 1.0])]
    assert found.credit(groups) == Grpo(GrpoConfig()).credit(groups)

    scores, batch = random_batch(1, [3, 2], torch.float32)
    (shares,) = found.shares([batch])
    outputs = found.loss(scores, batch, shares)
    outputs.loss.backward()
    assert scores.log_probs.grad is not None
    ratio = torch.exp(scores.log_probs.detach() - batch.old_log_probs)
    gate = torch.sigmoid(2.0 * (ratio - 1))
    expected = -4 * gate * (1 - gate) * ratio * batch.advantages * shares.mean
    assert batch.importance is not None
    torch.testing.assert_close(scores.log_probs.grad, expected * batch.importance)
