"""What the package ships: a model that Isobit and transformers load, and problems that do not
overlap.
"""

import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from isobit.config.data import JsonlData
from isobit.config.load import load_recipe
from isobit.config.precision import PrecisionConfig
from isobit.config.recipes import SftConfig
from isobit.data.sources import load_rows
from isobit.data.stop_tokens import stop_token_ids
from isobit.data.tokenizer import load_tokenizer
from isobit.models.folder import load_policy
from isobit.run.model_source import decoder_of
from isobit.starter import starter_folder
from isobit.starter.tasks import problems, question
from tools.starter.figures import measure
from tools.starter.tokenizer import EOS_ID, VOCAB_SIZE

FOLDER = starter_folder()


def test_finding_the_folder_imports_no_torch() -> None:
    code = (
        "import sys; from isobit.starter import starter_folder; "
        "assert starter_folder().is_dir(); print('torch' in sys.modules)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "False"
    )


def test_the_shipped_problems_are_those_of_the_task() -> None:
    for name, held_out in (("train", False), ("held_out", True)):
        rows = load_rows(JsonlData(path=FOLDER / f"{name}.jsonl"))
        expected = [
            (question(problem), {"answer": str(sum(problem))}) for problem in problems(held_out)
        ]
        assert [(row.prompt, row.columns) for row in rows] == expected


def test_the_weights_are_small_and_of_the_recipes_shape() -> None:
    assert (FOLDER / "model.safetensors").stat().st_size < 8_000_000
    policy = load_policy(FOLDER, PrecisionConfig(preset="fp8"))
    recipe = load_recipe(SftConfig, Path(__file__).parents[2] / "recipes" / "starter.toml")
    assert recipe.from_scratch is not None
    assert policy.config == decoder_of(recipe.from_scratch, tokens=99).with_tokenizer(99)
    assert 500_000 < sum(master.numel() for master in policy.parameters()) < 1_500_000


def test_the_tokenizer_fits_and_stops() -> None:
    tokenizer = load_tokenizer(FOLDER)
    assert len(tokenizer) <= VOCAB_SIZE
    assert stop_token_ids(tokenizer, FOLDER) == (EOS_ID,)


def test_transformers_loads_it_and_can_add() -> None:
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(FOLDER)
    model = AutoModelForCausalLM.from_pretrained(str(FOLDER), dtype=torch.float32)
    logits = model(torch.tensor([tokenizer("3+8+2+9=11,13,22")["input_ids"]])).logits[0]
    assert tokenizer.decode(logits[-4:-1].argmax(-1).tolist()) == ",22"


def test_there_is_much_to_learn_and_a_way_to_it() -> None:
    """Few greedy answers are right, a good part of the samples is worked out, and working out pays:
    what the quickstart rests on.
    """
    torch.set_num_threads(1)
    figures = measure(
        load_policy(FOLDER, PrecisionConfig(preset="fp8")),
        load_tokenizer(FOLDER),
        FOLDER / "held_out.jsonl",
        limit=100,
    )
    assert 0.2 < figures.greedy_accuracy < 0.65
    assert 0.2 < figures.sampled_worked_out < 0.5
    assert figures.worked_out_accuracy > 0.75
    assert figures.guess_accuracy < 0.25
