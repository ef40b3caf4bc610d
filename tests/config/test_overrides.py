import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobit.config.overrides import apply_overrides, nested_overrides, parse_overrides
from isobit.errors import ConfigError


def value_of(text: str):
    [(_, value)] = parse_overrides(["--key", text])
    return value


def test_the_three_ways_to_write_an_override_are_equal():
    expected = [(("training", "steps"), 5)]
    assert parse_overrides(["--training.steps", "5"]) == expected
    assert parse_overrides(["--training.steps=5"]) == expected
    assert parse_overrides(["training.steps=5"]) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("-1", -1),
        ("1e-4", 1e-4),
        ("true", True),
        ("fp8-linear", "fp8-linear"),
        ("runs/a b", "runs/a b"),
        ('"5"', "5"),
        ('["a", "b"]', ["a", "b"]),
        ('{type = "jsonl", path = "x"}', {"type": "jsonl", "path": "x"}),
        ("2026-01-31", "2026-01-31"),
        ("1\nb = 2", "1\nb = 2"),
        ("", ""),
    ],
)
def test_a_value_is_toml_where_it_is_a_toml_value_and_text_otherwise(text, expected):
    value = value_of(text)
    assert value == expected
    assert type(value) is type(expected)


@given(st.text())
def test_any_text_is_read_without_an_error(text):
    [(parts, _)] = parse_overrides([f"key={text}"])
    assert parts == ("key",)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--training.steps"], "--training.steps has no value"),
        (["--data.shuffle", "--seed", "1"], "--data.shuffle has no value"),
        (["5"], "'5' is not an override"),
        (["--training..steps", "5"], "'--training..steps' is not a dotted key"),
        (["=5"], "'=5' is not a dotted key"),
    ],
)
def test_what_is_no_override_is_refused_by_name(words, expected):
    with pytest.raises(ConfigError, match=expected):
        parse_overrides(words)


def test_missing_tables_are_made_and_the_given_ones_left_alone():
    given_values = {"data": {"train": {"size": 1}}}
    result = apply_overrides(
        given_values, [(("data", "eval", "held", "type"), "jsonl"), (("data", "train", "size"), 2)]
    )
    assert result == {"data": {"train": {"size": 2}, "eval": {"held": {"type": "jsonl"}}}}
    assert given_values == {"data": {"train": {"size": 1}}}


def test_the_last_override_of_a_key_wins():
    assert apply_overrides({}, [(("seed",), 1), (("seed",), 2)]) == {"seed": 2}


def test_a_key_below_a_plain_value_is_refused():
    with pytest.raises(
        ConfigError, match=r"training\.steps cannot be set: training is 3, not a table"
    ):
        apply_overrides({"training": 3}, [(("training", "steps"), 1)])


def test_a_precision_given_by_name_and_one_given_as_a_table_mix():
    assert apply_overrides({"precision": "fp8"}, [(("precision", "wgrad"), "bf16")]) == {
        "precision": {"preset": "fp8", "wgrad": "bf16"}
    }
    table = {"precision": {"preset": "fp8", "last_layers_bf16": 1}}
    assert apply_overrides(table, [(("precision",), "bf16")]) == {
        "precision": {"preset": "bf16", "last_layers_bf16": 1}
    }


def test_tables_override_the_keys_that_they_name_and_no_others():
    table = {
        "data": {"train": {"limit": 3, "path": "a"}},
        "precision": {"preset": "fp8", "wgrad": "bf16"},
    }
    changes = nested_overrides(
        {"data": {"train": {"limit": 9}}, "training.steps": 5, "precision": "bf16"}
    )
    assert apply_overrides(table, changes) == {
        "data": {"train": {"limit": 9, "path": "a"}},
        "training": {"steps": 5},
        "precision": {"preset": "bf16", "wgrad": "bf16"},
    }
