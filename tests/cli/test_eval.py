import json

import pytest

from isobit.cli.main import main
from tests.forked import command

REWARD = ["--reward", "isobit.starter.tasks:correct_answer"]
SMALL = [
    "--problems",
    "3",
    "--max-new-tokens",
    "12",
    "--rollout.max_sequences",
    "6",
    "--precision",
    "fp32",
    "--threads",
    "1",
]


def test_the_starter_on_its_held_out_problems(capsys):
    assert main(["eval", "starter", "--data", "starter:held_out.jsonl", *REWARD, *SMALL]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("fp32: held_out accuracy ")
    assert " on 3 problems" in shown


def test_a_precision_may_be_a_recipes_table(capsys):
    words = ["--data", "starter:held_out.jsonl", *REWARD, *SMALL]
    table = '{preset = "fp8", modules_bf16 = ["down_proj"]}'
    assert main(["eval", "starter", *words, "--precision", table]) == 0
    assert capsys.readouterr().out.startswith("fp8: held_out accuracy ")
    table = '{preset = "fp8", modules_bf16 = ["gone_proj"]}'
    assert main(["eval", "starter", *words, "--precision", table]) == 2
    assert "'gone_proj', which the model does not have" in capsys.readouterr().err


def test_two_processes_that_share_the_model_find_what_one_finds(tmp_path, capsys):
    words = ["--data", "starter:held_out.jsonl", *REWARD, *SMALL, "--json"]
    assert main(["eval", "starter", *words]) == 0
    alone = json.loads(capsys.readouterr().out)
    out, errors = tmp_path / "out", tmp_path / "errors"
    process = command(["eval", "starter", *words, "--cluster.rollout_tp", "2"], out, errors)
    process.join()
    assert process.exitcode == 0, errors.read_text()
    assert json.loads(out.read_text()) == alone


def test_several_samples_as_json(tmp_path, capsys):
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(f'{{"prompt": "1+2+3+{i}=", "answer": "{6 + i}"}}\n' for i in range(5)))
    assert (
        main(
            [
                "eval",
                "starter",
                "--data",
                str(data),
                *REWARD,
                *SMALL,
                "--samples",
                "2",
                "--temperature",
                "1",
                "--json",
            ]
        )
        == 0
    )
    result = json.loads(capsys.readouterr().out)["sums"]
    assert result["accuracy"] == result["mean_reward"]
    assert (result["problems"], result["samples"]) == (3, 2)
    assert set(result["pass_at"]) == {"1", "2"}


def test_standard_output_has_the_json_alone_whatever_a_reward_prints(tmp_path, capfd):
    """The mean of this reward is no share, and so no accuracy."""
    reward = tmp_path / "loud.py"
    reward.write_text(
        "import sys\n"
        "print('loaded')\n"
        "def f(prompt, completion):\n"
        "    print('graded')\n"
        "    sys.stdout.flush()\n"
        "    return 1.5\n"
    )
    words = ["--data", "starter:held_out.jsonl", "--reward", f"{reward}:f", *SMALL, "--json"]
    for in_process in ("false", "true"):
        assert main(["eval", "starter", *words, "--reward.in_process", in_process]) == 0
        found = json.loads(capfd.readouterr().out)["held_out"]
        assert (found["mean_reward"], found["accuracy"], found["problems"]) == (1.5, None, 3)


def test_what_is_too_long_is_left_out_and_said(tmp_path, capsys):
    data = tmp_path / "sums.jsonl"
    data.write_text(
        f'{{"prompt": "1+2+3+4=", "answer": "10"}}\n{{"prompt": "{"1+" * 40}1=", "answer": "41"}}\n'
    )
    words = ["--data.max_prompt_tokens", "30", "--data.too_long", "drop", *REWARD, *SMALL]
    assert main(["eval", "starter", "--data", str(data), *words]) == 0
    shown = capsys.readouterr()
    assert " on 1 problems" in shown.out
    assert "isobit: sums: 1 too long: dropped" in shown.err


def test_a_task_of_reasoning_gym_is_scored_by_itself(capsys):
    assert main(["eval", "starter", "--data", "task:chain_sum", *SMALL, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["chain_sum"]["problems"] == 3


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--data", "task:chain_summ"], "chain_sum"),
        (["--data", "none.jsonl", *REWARD], "none.jsonl"),
        (["--data", "starter:held_out.jsonl", "--reward", "no_module:f"], "no_module"),
        (
            ["--data", "starter:held_out.jsonl", *REWARD, "--samples", "4"],
            "evaluation.samples is 4",
        ),
        (
            ["--data", "starter:held_out.jsonl", *REWARD, "--samples", "0"],
            "evaluation.samples: should be greater than 0",
        ),
        (
            ["--data", "starter:held_out.jsonl", *REWARD, "--cluster.processes", "2"],
            "cluster.processes is 2, but an evaluation has one engine",
        ),
    ],
)
def test_what_cannot_be_used_is_named_and_exits_2(words, expected, capsys):
    assert main(["eval", "starter", *words, *SMALL]) == 2
    assert expected in capsys.readouterr().err
