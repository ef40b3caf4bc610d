import json

import pytest

import isobit.run.verify
from isobit.cli.main import main

SMALL = ["--prompts", "4", "--samples", "2", "--max-new-tokens", "4", "--threads", "1"]


def test_an_exact_flow_has_no_difference_and_as_json_the_counts(capsys):
    code = main(["verify", "starter", "--precision", "fp32", *SMALL, "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["tokens_compared"] > 0
    assert (result["tokens_differing"], result["max_abs_diff"]) == (0, 0.0)
    assert code == (2 if result["missing"] else 0)


def test_a_flow_with_two_functions_exits_1(capsys):
    assert main(["verify", "starter", "--precision", "fp8-rollout", *SMALL]) == 1
    *scenarios, total = capsys.readouterr().out.splitlines()
    assert scenarios
    assert total.startswith("fp8-rollout: ")
    assert not total.startswith("fp8-rollout: 0 of ")


def test_a_check_that_breaks_exits_2_with_its_traceback(capsys, monkeypatch):
    def broken(*arguments: object) -> None:
        raise RuntimeError("no answer")

    monkeypatch.setattr(isobit.run.verify, "verify", broken)
    assert main(["verify", "starter"]) == 2
    assert "RuntimeError: no answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["no-such-folder"], "no-such-folder"),
        (["starter", "--precision", "fp9"], "precision.preset: should be"),
        (["starter", "--rollout.top_k", "3"], "rollout: unknown key"),
    ],
)
def test_what_cannot_be_used_is_named_and_exits_2(words, expected, capsys):
    assert main(["verify", *words]) == 2
    assert expected in capsys.readouterr().err
