import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from shlex import split

import pytest

from isobit.cli.main import main

QUICKSTART = str(Path(__file__).parents[2] / "recipes" / "quickstart.toml")
TINY = split(
    "--training.steps 1 --training.prompts_per_step 2 --training.samples_per_prompt 2 "
    "--data.train.limit 4 --data.eval.held_out.limit 2 --rollout.max_sequences 4 --threads 1"
)


def test_a_recipe_with_overrides_trains_and_a_second_run_is_refused(tmp_path, capsys):
    output = tmp_path / "run"
    assert main(["train", QUICKSTART, "--output", str(output), *TINY]) == 0
    summary = json.loads((output / "summary.json").read_text())
    assert summary["steps"] == 1
    assert summary["tokens_compared"] > 0
    assert summary["tokens_differing"] == 0

    before = sorted(path.stat().st_mtime_ns for path in output.rglob("*"))
    assert main(["train", QUICKSTART, "--output", str(output), *TINY]) == 2
    assert "already holds files" in capsys.readouterr().err
    assert sorted(path.stat().st_mtime_ns for path in output.rglob("*")) == before


@pytest.mark.few(1)
@pytest.mark.parametrize("command", ["train", "sft"])
def test_one_of_anything_is_told_in_the_singular(command, tmp_path, capsys):
    ones = "1 training.steps training.prompts_per_step data.train.limit data.eval.NAME.limit"
    recipe = {"train": QUICKSTART, "sft": QUICKSTART.replace("quickstart", "fine_tune")}[command]
    name = next(iter(tomllib.loads(Path(recipe).read_text())["data"]["eval"]))
    one, *keys = ones.replace("NAME", name).split()
    words = [word for key in keys for word in (f"--{key}", one)]
    words += ["--threads", "1", *(["--rollout.max_sequences", "4"] if command == "train" else [])]
    for output in ("planned", "done"):
        more = ["--dry-run"] if output == "planned" else []
        assert main([command, recipe, "--output", str(tmp_path / output), *words, *more]) == 0
    captured = capsys.readouterr()
    said = captured.out + captured.err
    assert re.search(r"\b1 (training prompt|example)\b", said) and " for 1 step" in said
    assert re.findall(r"(?<![.,\d])1 [a-z]+s\b", said) == []


def test_an_unknown_key_is_refused_before_anything_is_written(tmp_path, capsys):
    output = tmp_path / "run"
    assert main(["train", QUICKSTART, "--output", str(output), "--training.stepz", "5"]) == 2
    assert "error: " in (shown := capsys.readouterr().err)
    assert "training.stepz: unknown key; did you mean training.steps?" in shown
    assert not output.exists()


def test_print_config_prints_the_resolved_recipe_and_writes_nothing(tmp_path, capsys):
    output = tmp_path / "run"
    words = ["--output", str(output), "--training.steps", "3"]
    assert main(["train", "--print-config", QUICKSTART, *words]) == 0
    printed = tomllib.loads(capsys.readouterr().out)
    assert printed["training"]["steps"] == 3
    assert printed["output"] == str(output)
    assert not output.exists()


def test_help_lists_the_keys_of_a_recipe(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--help"])
    shown = capsys.readouterr().out
    assert "--training.prompts_per_step  (int, default 16)" in shown
    assert "--data.eval.NAME.path  (path | list of path)" in shown


def test_a_recipe_is_required(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["train"])
    assert "RECIPE.toml" in capsys.readouterr().err


@pytest.mark.few(2)
@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize(
    "words", [[], ["--gpu", "h100", "--gpus", "8"], ["--gpu", "rtx4090"]], ids=len
)
def test_a_dry_run_is_no_wider_than_the_terminal(words, width, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.chdir(tmp_path)
    assert main(["train", QUICKSTART, "--dry-run", *words, *TINY]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > width and " " in line.strip()] == []


def test_a_dry_run_prints_the_run_the_flow_and_the_memory_and_touches_nothing(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    output = tmp_path / "run"
    assert main(["train", QUICKSTART, "--dry-run", "--output", str(output), *TINY]) == 0
    shown = capsys.readouterr().out
    assert "4 training prompts; evaluation problems: 2 in held_out" in shown
    assert "samples_per_prompt" not in shown and "one function" not in shown
    assert "masters" in shown and "KV pages" in shown and "nothing was written" in shown
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_says_which_precision_a_recipe_has_that_names_none(tmp_path, capsys):
    text = Path(QUICKSTART).read_text(encoding="utf-8")
    recipe = tmp_path / "open.toml"
    kept = [line for line in text.splitlines() if not line.startswith("precision")]
    recipe.write_text("\n".join(kept), encoding="utf-8")
    for words, count in (([], 1), (["--precision", "int8"], 0)):
        output = str(tmp_path / "run")
        assert main(["train", str(recipe), "--dry-run", "--output", output, *TINY, *words]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert shown.count("note: the recipe names no precision") == count


def test_a_dry_run_tells_of_references_and_refuses_data_without_any(tmp_path, capsys):
    data = tmp_path / "sums.jsonl"
    rows = [{"prompt": f"1+2+3+{i}=", "answer": None if i else "6"} for i in range(4)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["train", QUICKSTART, "--dry-run", "--output", str(tmp_path / "run"), *TINY]
    words += ["--data.train.path", str(data), "--reward.function", "exact_match"]
    assert main(words) == 0
    told = "references of data.train for exact_match: 3 missing of 4 (75.0%)"
    assert told in " ".join(capsys.readouterr().out.split())
    data.write_text("".join(json.dumps(row) + "\n" for row in rows[1:]))
    assert main(words) == 2
    assert "can use none of the 3 references of data.train" in capsys.readouterr().err


def test_a_verbose_dry_run_ends_with_the_formats_and_the_recipe(tmp_path, capsys):
    words = ["--output", str(tmp_path / "run"), "--dry-run", "--verbose", *TINY]
    assert main(["train", QUICKSTART, *words]) == 0
    shown = capsys.readouterr().out
    places = [
        shown.index(part)
        for part in (
            "masters",
            "training prompts",
            "one function in rollout",
            "samples_per_prompt = 2",
        )
    ]
    assert places == sorted(places)


@pytest.mark.parametrize(
    "words",
    [
        ["--output", "runs/t5", QUICKSTART],
        ["--output=runs/t5", QUICKSTART],
        ["output=runs/t5", QUICKSTART],
        ["--output", "x.toml", QUICKSTART, "--output", "runs/t5"],
        ["--training.steps", "7", "--output", "runs/t5", "--print-config", QUICKSTART],
        [QUICKSTART, "--output", "runs/t5"],
    ],
)
def test_overrides_may_stand_before_the_recipe(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--print-config", *words]) == 0
    assert 'output = "runs/t5"' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (
            ["--output", "runs/t5"],
            2,
            "the recipe is missing: isobit train RECIPE.toml --output runs",
        ),
        (
            ["--num_generations", "8"],
            2,
            "the recipe is missing: isobit train RECIPE.toml --num_gen",
        ),
        (["--steps", "--output=x"], 2, "the recipe is missing"),
        ([], 2, "required: RECIPE.toml"),
    ],
)
def test_a_command_line_without_a_recipe_says_where_it_stands(
    words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=str(code)):
        main(["train", *words])
    shown = capsys.readouterr().err
    assert said in shown
    usage = shown[: shown.index("\nisobit train: error")]
    for option in ("--resume", "--dry-run", "--gpu NAME", "--gpus N", "--print-config"):
        assert option in usage
    assert max(map(len, usage.splitlines())) <= 80


def test_another_program_s_flags_before_the_recipe_are_answered(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "--num_generations", "8", "--bf16", QUICKSTART]) == 2
    shown = capsys.readouterr().err
    assert "num_generations: unknown key; use training.samples_per_prompt" in shown
    assert "bf16: unknown key" in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--cluster.processes", "4"],
            "--gpus plans with cluster.processes = 8, and --cluster.pro",
        ),
        (["--cluster={processes = 4}"], "--gpus plans with cluster.processes = 8"),
        (["--device", "cpu"], "--gpu plans with device = cuda, and --device is cpu: leave one"),
        (["--cluster.processes", "8", "--device", "auto"], ""),
    ],
)
def test_two_numbers_of_gpus_are_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plan = ["--dry-run", "--gpu", "h200", "--gpus", "8", "--output", str(tmp_path / "run"), *TINY]
    code = main(["train", QUICKSTART, *plan, *words])
    shown = capsys.readouterr()
    assert code == (2 if said else 0)
    assert said in shown.err if said else shown.out.startswith("on 8 x H200 it fits")


def test_a_dry_run_plans_for_gpus_that_are_not_here(tmp_path, capsys):
    output = tmp_path / "run"
    output.mkdir()
    (output / "file").touch()
    words = ["--dry-run", "--output", str(output), *TINY]
    assert main(["train", QUICKSTART, *words, "--gpu", "h200", "--gpus=2"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("on 2 x H200 it fits\neach process's device, of 139 GiB:")
    assert "time, estimated:" in shown and "rounds: " in shown
    assert main(["train", QUICKSTART, "--gpu", "0.001", *words]) == 2
    assert "can be planned with" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--dry-run", "--gpu", "tpu"],
            "the GPU 'tpu' is not known; known are h100, h200, rtx3090",
        ),
        (
            ["--dry-run", "--gpus", "2"],
            "--gpus says how many, and not of which kind: add --gpu h100",
        ),
        (["--gpu", "h200"], "--gpu is for --dry-run"),
        (["--dry-run", "--resume", "--gpu", "h200"], "--gpu plans a new run"),
    ],
)
def test_what_cannot_be_planned_is_refused(tmp_path, capsys, words, said):
    output = tmp_path / "run"
    assert main(["train", QUICKSTART, "--output", str(output), *TINY, *words]) == 2
    assert said in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--cluster.rollouters 2 --async.lag 1", "rollouters is 2, but the run has 2 processes"),
        ("--cluster.rollouters 9 --async.lag 1", "rollouters is 9, but the run has 2 processes"),
        (
            "--cluster.rollouters 2 --async.max_staleness 1",
            "rollouters is 2, but the run has 2 processes, of which at least one has to train",
        ),
        (
            '--rollout.engine http --rollout.servers ["http://a:1"]',
            "rollout.servers names 1, and the run has 2 processes, each of which samples at",
        ),
    ],
)
@pytest.mark.parametrize("flags", [["--dry-run"], []])
def test_parts_that_do_not_go_with_the_processes_are_refused_before_these_are_started(
    tmp_path, capsys, monkeypatch, words, said, flags
):
    monkeypatch.setattr("isobit.launch.local.launch", lambda *_: pytest.fail("they are started"))
    output = tmp_path / "run"
    asked = ["--output", str(output), *TINY, "--cluster.processes", "2", *words.split()]
    assert main(["train", QUICKSTART, *flags, *asked]) == 2
    assert said in capsys.readouterr().err
    assert not output.exists()


def test_a_dry_run_for_a_gpu_that_is_not_here_says_how_to_plan_it(
    tmp_path, capsys, monkeypatch, config_alone
):
    problem = "torch sees no NVIDIA GPU"
    monkeypatch.setattr("isobit.kernels.backend.usable_devices", lambda: {"cuda": problem})
    words = ["train", QUICKSTART, "--dry-run", "--output", str(tmp_path / "run"), *TINY]
    assert main([*words, "--device", "cuda"]) == 2
    assert f"{problem}; use device 'cpu', or plan for a GPU that" in capsys.readouterr().err


def test_a_dry_run_without_weights_says_how_to_plan_it(tmp_path, capsys, config_alone):
    words = ["--output", str(tmp_path / "run"), "--checkpoint.keep_last", "0", *TINY]
    words += ["--model", str(config_alone("qwen3-8b")), "--training.prompts_per_step", "1"]
    assert main(["train", QUICKSTART, "--dry-run", *words]) == 2
    said = capsys.readouterr().err
    assert "neither model.safetensors nor" in said and "--gpu h200 plans from config.json" in said


@pytest.mark.exhaustive
def test_a_plan_takes_no_triton(tmp_path, config_alone):
    """On a machine that has neither a GPU nor the packages for one."""
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        f'model = "{config_alone("qwen3-8b")}"\noutput = "{tmp_path / "run"}"\n[data.train]\n'
        'type = "jsonl"\npath = "starter:train.jsonl"\nlimit = 8\n[reward]\nin_process = true\n'
        'function = "isobit.starter.tasks:correct_answer"\n[training]\nmoments = "bf16"\n'
    )
    program = (
        "import sys\n"
        "for name in ('triton', 'deep_gemm'): sys.modules[name] = None\n"
        "from isobit.cli.main import main\n"
        f"code = main(['train', {str(recipe)!r}, '--dry-run', '--gpu', 'h200'])\n"
        "code |= main(['inspect', sys.argv[1], '--gpu', 'h100', '--gpus', '8'])\n"
        "assert not any(name.startswith('isobit.kernels.hopper.gemm') for name in sys.modules)\n"
        "sys.exit(code)"
    )
    words = [sys.executable, "-c", program, str(config_alone("qwen3-30b-a3b"))]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "on 1 x H200 it fits" in done.stdout and "on 8 x H100 with 78 GiB" in done.stdout
    assert done.stdout.count("time, estimated:") >= 1


def test_a_dry_run_refuses_what_the_run_would(tmp_path, capsys):
    words = ["--output", str(tmp_path / "run"), "--rollout.temperature", "0"]
    assert main(["train", QUICKSTART, "--dry-run", *words]) == 2
    assert "rollout.temperature is 0" in capsys.readouterr().err


RECIPES = Path(__file__).parents[2] / "recipes"
TINY_SFT = split(
    "--training.steps 1 --training.prompts_per_step 2 --threads 1 --data.eval.held_out.limit 2 "
    f"--data.train.path {RECIPES / 'fine_tune.jsonl'} "
    f"--data.eval.held_out.path {RECIPES / 'fine_tune_held_out.jsonl'}"
)


@pytest.mark.exhaustive
def test_a_recipe_with_overrides_fine_tunes_and_a_second_run_is_refused(tmp_path, capsys):
    words = ["sft", str(RECIPES / "fine_tune.toml"), "--output", str(tmp_path / "run"), *TINY_SFT]
    assert main(words) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 1
    assert summary["tokens_trained"] > 0
    assert main(words) == 2
    assert "already holds files" in capsys.readouterr().err


def test_a_key_of_training_by_reward_is_refused(tmp_path, capsys):
    output = tmp_path / "run"
    words = ["--output", str(output), *TINY_SFT, "--training.samples_per_prompt", "4"]
    assert main(["sft", str(RECIPES / "fine_tune.toml"), *words]) == 2
    assert "training.samples_per_prompt: unknown key" in capsys.readouterr().err
    assert not output.exists()


def test_print_config_may_stand_after_the_recipe_and_writes_nothing(tmp_path, capsys):
    output = tmp_path / "run"
    words = ["--output", str(output), "--print-config"]
    assert main(["sft", str(RECIPES / "fine_tune.toml"), *words]) == 0
    assert tomllib.loads(capsys.readouterr().out)["training"]["prompts_per_step"] == 25
    assert not output.exists()


def test_help_lists_the_keys_of_its_own_recipe(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["sft", "recipe.toml", "--help"])
    shown = capsys.readouterr().out
    assert "--from_scratch.hidden_size  (int)" in shown
    assert "--data.train.completion  (str, default completion)" in shown
    assert "samples_per_prompt" not in shown
