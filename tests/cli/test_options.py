import pytest

from isobit.cli.options import FOLDER, PRECISION, Command, option
from isobit.config.commands import ServeConfig
from isobit.util.errors import ConfigError

COMMAND = Command(
    "complete",
    "Complete texts.",
    [
        FOLDER,
        PRECISION,
        option("--top-p P", "draw from the likeliest tokens", key="rollout.top_p"),
        [option("--prompt TEXT"), option("--data FILE")],
    ],
)


def settings(*words: str, **tables: object) -> ServeConfig:
    options, overrides = COMMAND.read_some(["starter", "--prompt", "a", *words])
    return COMMAND.settings(ServeConfig, options, overrides, **tables)


def test_an_option_with_a_key_lies_between_tables_and_overrides() -> None:
    tables = {"rollout": {"top_p": 0.3, "top_k": 4}}
    assert settings(**tables).rollout.top_p == 0.3
    rollout = settings("--top-p", "0.5", "--rollout.max_sequences", "2", **tables).rollout
    assert (rollout.top_p, rollout.top_k, rollout.max_sequences) == (0.5, 4, 2)
    assert settings("--top-p", "0.5", "--rollout.top_p", "0.7").rollout.top_p == 0.7


def test_a_precision_replaces_the_whole_table() -> None:
    recorded = {"preset": "fp8", "attention": "int8"}
    assert settings(precision=dict(recorded)).precision.attention == "int8"
    precision = settings("--precision", "bf16", precision=dict(recorded)).precision
    assert (precision.preset, precision.attention) == ("bf16", None)


def test_a_value_out_of_range_is_named_by_its_key() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.top_p"):
        settings("--top-p", "7")


@pytest.mark.parametrize("words", [[], ["--prompt", "a", "--data", "b"]])
def test_one_option_of_a_choice_is_given(words: list[str], capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        COMMAND.read(["starter", *words])
    assert "--data" in capsys.readouterr().err
