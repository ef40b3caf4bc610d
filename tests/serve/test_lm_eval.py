"""lm-evaluation-harness's ``local-completions`` against a server: its log-likelihoods are those of
the training forward, and its greedy answers the engine's.  Where the harness is not installed, the
requests that it sends (0.4.13) are sent, and their answers read as it reads them.
"""

import json
import os
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from isobit.models.folder import LoadedModel, load_model
from isobit.models.scorer import Scorer
from isobit.records.packing import lay_end_to_end
from isobit.records.sequence import TokenSequence
from tests.serve.servers import KEY, Running

PAIRS = (("3+8+2+9=", "11,13,22"), ("1+1=", "2"), ("12+7=" * 40, "19,26"), ("a", "b c"))


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model("starter", "fp8", trainable=False)


def tokens_of(model: LoadedModel, text: str) -> list[int]:
    ids = model.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert isinstance(ids, list)
    return ids


def by_training(model: LoadedModel, context: list[int], continuation: list[int]) -> list[float]:
    zeros = [0.0] * len(continuation)
    sequence = TokenSequence.of_answer(context, continuation, zeros, [1] * len(zeros), 1.0)
    scores = Scorer(model.policy).score(lay_end_to_end([sequence]))
    return scores.log_probs.tolist()


def as_lm_eval_reads(choice: dict[str, Any], context: int) -> tuple[float, bool]:
    """``LocalCompletionsAPI.parse_logprobs``."""
    found = choice["logprobs"]
    log_probs = found["token_logprobs"][context:-1]
    tops = found["top_logprobs"][context:-1]
    greedy = all(one == max(top.values()) for one, top in zip(log_probs, tops, strict=True))
    return sum(log_probs), greedy


def test_log_likelihoods_are_those_of_training(server: Running, model: LoadedModel) -> None:
    pairs = [(tokens_of(model, a), tokens_of(model, b)) for a, b in PAIRS]
    body = {
        "model": "chatty", "prompt": [[*a, *b] for a, b in pairs], "temperature": 0,
        "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True,
    }  # fmt: skip
    made = server.answer(body)["choices"]
    for (context, continuation), choice in zip(pairs, made, strict=True):
        expected = by_training(model, context, continuation)
        found = choice["logprobs"]["token_logprobs"][len(context) : -1]
        assert torch.equal(torch.tensor(found), torch.tensor(expected))
        assert as_lm_eval_reads(choice, len(context))[0] == sum(expected)


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm_eval is not installed")
def test_the_harness_itself(
    server: Running, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]
    from lm_eval.models.openai_completions import (  # pyright: ignore[reportMissingImports]
        LocalCompletionsAPI,
    )

    monkeypatch.setitem(os.environ, "OPENAI_API_KEY", KEY)
    lm = LocalCompletionsAPI(
        base_url=f"{server.url}/completions", model="chatty", tokenizer=str(model.folder),
        tokenizer_backend="huggingface", max_length=512, batch_size=3,
    )  # fmt: skip
    asked = [Instance("loglikelihood", {}, pair, place) for place, pair in enumerate(PAIRS)]
    found = lm.loglikelihood(asked)
    for (context, continuation), (log_likelihood, is_greedy) in zip(PAIRS, found, strict=True):
        ids, whole = lm.tok_encode(context), lm.tok_encode(context + continuation)
        expected = by_training(model, ids, whole[len(ids) :])
        assert log_likelihood == sum(expected)
        assert isinstance(is_greedy, bool)
    until = {"until": ["\n"], "max_gen_toks": 16, "do_sample": False}
    (text,) = lm.generate_until([Instance("generate_until", {}, ("3+8+2+9=", until), 0)])
    body = {"model": "chatty", "prompt": [tokens_of(model, "3+8+2+9=")], "temperature": 0}
    assert text == server.answer(body)["choices"][0]["text"]
    print(json.dumps({"lm_eval": found}))
