"""A server with adapters beside its model, which are models of their own for clients."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from isobit.cli.serve import run_serve
from isobit.config.lora import LORA_TARGETS
from isobit.config.precision import named_precision
from isobit.config.rollout import RolloutConfig
from isobit.models.config import Lora
from isobit.models.folder import load_model, read_config, read_masters, write_model
from isobit.models.policy import Policy
from isobit.records.text import Completion, Prompt
from isobit.rollout.engine import generate
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Request
from isobit.starter import starter_folder
from isobit.util.errors import ConfigError
from tests.models.test_adapters import moved
from tests.serve.servers import KEY, Running, choices, serving

NAMES = ("starter", "small", "large")
LORAS = {"small": Lora(4, 8.0, ("q_proj", "down_proj")), "large": Lora(16, 32.0, LORA_TARGETS)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of the starter, and of two adapters of it."""
    place, base = tmp_path_factory.mktemp("adapters"), starter_folder()
    made = {"starter": base}
    for seed, (name, lora) in enumerate(LORAS.items()):
        config = replace(read_config(base), lora=lora)
        policy = Policy(config, named_precision("fp32"), read_masters(base, config))
        model = replace(load_model(base, "fp32"), policy=moved(policy, seed, 0.02))
        write_model(model, place / name)
        made[name] = place / name
    return made


@pytest.fixture(scope="module")
def server(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    modules = [f"{name}={folders[name]}" for name in LORAS]
    place = tmp_path_factory.mktemp("server")
    with serving(
        "starter", place, "--lora-modules", *modules, "--rollout.kv_pages", "20",
        "--rollout.max_batched_tokens", "100",
    ) as running:  # fmt: skip
        yield running
        assert running.end() == 0
        assert "Traceback" not in running.log.read_text()


def alone(folder: Path, text: str, seed: int) -> list[Completion]:
    model = load_model(folder, "int8", trainable=False)
    sampling = model.sampling(RolloutConfig(max_new_tokens=30))
    ids = tuple(model.tokenizer(text)["input_ids"])
    request = Request(Prompt("alone", text, ids), 0, 2, sampling, seed)
    return generate(NativeEngine(model.policy, RolloutConfig(), model.tokenizer, 0), [request])[0]


def test_models_are_listed_with_their_parent(server: Running, folders: dict[str, Path]) -> None:
    import openai

    client = openai.OpenAI(base_url=server.url, api_key=KEY, max_retries=0)
    found = {one.id: one.model_extra or {} for one in client.models.list().data}
    assert [*found] == [*NAMES]
    assert [one["parent"] for one in found.values()] == [None, "starter", "starter"]
    assert [one["root"] for one in found.values()][1:] == [str(folders[one]) for one in LORAS]
    assert client.models.retrieve("large").id == "large"
    for model in ("medium", str(folders["small"])):
        with pytest.raises(openai.NotFoundError, match="has 'starter', 'small', 'large'"):
            client.completions.create(model=model, prompt="1+1=")


def test_answers_at_once_are_those_of_each_model_alone(
    server: Running, folders: dict[str, Path]
) -> None:
    asked = [(name, text, seed) for seed, text in enumerate(("3+8+2+9=", "7*8=")) for name in NAMES]

    def answer(one: tuple[str, str, int]) -> list[dict[str, Any]]:
        model, prompt, seed = one
        body = {"model": model, "prompt": prompt, "seed": seed, "n": 2, "max_tokens": 30}
        found = server.answer(body | {"logprobs": 2, "return_token_ids": True, "temperature": 1.0})
        assert found["model"] == model
        return choices(found)

    with ThreadPoolExecutor(len(asked)) as threads:
        answers = list(threads.map(answer, asked))
    first = set[tuple[float, ...]]()
    for (name, text, seed), found in zip(asked, answers, strict=True):
        for choice, expected in zip(found, alone(folders[name], text, seed), strict=True):
            assert choice["token_ids"] == list(expected.token_ids)
            drawn = torch.tensor(choice["logprobs"]["token_logprobs"])
            assert torch.equal(drawn, torch.tensor(list(expected.log_probs)))
        first.add(tuple(found[0]["logprobs"]["token_logprobs"]))
    assert len(first) == len(asked), "the models differ"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--lora-modules", "a=x", "a=y"], "two models are called 'a'"),
        (["--lora-modules", "starter=x"], "two models are called 'starter'"),
        (["--lora-modules", "a=x", "--follow"], "leave --follow and --allow-weight-updates out"),
    ],
)
def test_names_and_options_that_contradict_each_other_are_refused(
    words: list[str], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        run_serve(["starter", *words])


def test_an_adapter_without_a_path_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_serve(["starter", "--lora-modules", "a"])
    assert "'a': name an adapter and its folder, as NAME=PATH" in capsys.readouterr().err
