"""Environments of verifiers as they are: what they ask, what they are told, and their rewards."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from isobit.config.data import ChatConfig, VerifiersData
from isobit.config.environment import EnvironmentConfig
from isobit.data.sources import load_rows
from isobit.environments.env_backends import Call, HostStart, Turn
from isobit.environments.pool import Environments
from isobit.environments.verifiers_classic import Conversation, HostedVerifiers
from isobit.run.acting import open_environments, read_tools
from isobit.starter import starter_folder
from isobit.util.errors import ConfigError, DataError, ToolError

pytest.importorskip("verifiers", reason="`pip install 'isobit[verifiers]'`")

GAMES = Path(__file__).parent / "games.py"
MOST = 200
"""Characters of a result."""


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """Those of this process, whatever an environment that is made here does with them."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def hosted(name: str) -> HostedVerifiers:
    return HostedVerifiers(HostStart("verifiers", str(GAMES), {"name": name}, 10.0, 1 << 30, MOST))


def begun(environment: HostedVerifiers, **columns: Any) -> tuple[Conversation, dict[str, Any]]:
    """An episode in this process, and what it has said for the prompt."""
    episode = environment.open()
    prompt = [{"role": "user", "content": "Guess."}]
    return episode, episode.begin({"prompt": prompt, **columns})


def call(name: str, *positional: Any, **arguments: Any) -> Turn:
    return Turn([Call(name, positional, arguments)], "I call.")


def said(text: str) -> Turn:
    return Turn([], text)


def test_a_single_turn_is_scored_by_the_rubric_in_a_process_of_its_own() -> None:
    given = {"verifiers": str(GAMES), "options": {"name": "sums"}}
    made = Environments[str](EnvironmentConfig.model_validate(given), MOST)
    try:
        assert made.tools() == []
        assert (made.has_reward, made.opens, made.leads, made.speaks) == (True, True, True, False)
        prompt = [{"role": "user", "content": "6 + 1 = ?"}]
        columns = {"prompt": prompt, "answer": "7"}
        long = Turn([], "It is <answer>7</answer>, I am sure of it.", is_cut=True)
        made.ask("right", columns, [said("<answer>7</answer>")])
        made.ask("long", columns, [long], wants_reward=True)
        found = dict(made.poll(0.1))
        while made.num_waiting:
            found |= dict(made.poll(0.1))
    finally:
        made.close()
    assert {key: (one.is_over, one.reward) for key, one in found.items()} == {
        "right": (True, 1.25),
        "long": (True, 1.0),
    }


def test_tools_are_called_by_the_environment() -> None:
    environment = hosted("tools")
    (schema,) = environment.ready()["ready"]
    assert list(schema["function"]["parameters"]["properties"]) == ["a", "b"]
    episode, opening = begun(environment)
    assert opening == {}  # the row's prompt
    assert episode.answer([call("add", 3, b=4)], False) == {"results": [["ok", "7"]]}
    wrong = Turn([Call("nothing", (), {}), Call("add", (), {"c": 1})])
    (_, unknown), (_, unexpected) = episode.answer([wrong], False)["results"]
    assert unknown == "'nothing'"
    assert "unexpected keyword argument 'c'" in unexpected
    assert episode.answer([said("7")], False) == {"over": True, "reward": 3.0}


def test_each_rollout_has_a_state_and_a_limit_ends_it_with_its_reward() -> None:
    environment = hosted("counter")
    (schema,) = environment.ready()["ready"]
    assert list(schema["function"]["parameters"]["properties"]) == ["by"]
    (one, _), (other, _) = (begun(environment, info={"start": start}) for start in (10, 5))
    assert one.answer([call("count", by=1)], False) == {"results": [["ok", "total 11"]]}
    assert other.answer([call("count", by=1)], False) == {"results": [["ok", "total 6"]]}
    assert one.answer([call("count", by=2)], True) == {"over": False, "reward": 13.0}


def test_a_game_speaks_as_the_user_and_ends_itself() -> None:
    environment = hosted("guess")
    assert environment.ready()["speaks"]
    episode, opening = begun(environment, answer="7")
    texts = ("Guess.", "It is below 10.")
    assert opening == {"opening": [{"role": "user", "content": text} for text in texts]}
    assert episode.answer([said("3")], False) == {"results": [["user", "Not 3."]]}
    (told,) = episode.answer([said("x" * 500)], False)["results"]
    assert told == ["user", "Not " + "x" * (MOST - 4)]
    assert episode.answer([said("7")], False) == {"over": True, "reward": 1 / 3}


def test_turns_that_were_answered_elsewhere_are_made_up_for() -> None:
    episode, _ = begun(hosted("guess"), answer="7")
    assert episode.answer([said("1"), said("2")], False) == {"results": [["user", "Not 2."]]}
    assert episode.answer([Turn([], "3", is_cut=True)], True) == {"over": False, "reward": 0.0}
    episode, _ = begun(hosted("guess"), answer="7")
    with pytest.raises(RuntimeError, match="ended before a turn that it had answered"):
        episode.answer([said("7"), said("2")], False)


def test_what_an_environment_raises_is_the_failure_of_its_episode() -> None:
    _, opening = begun(hosted("guess"), answer="broken")
    assert opening["failed"] == "crash"
    assert "no such game" in opening["message"]
    hasty, _ = begun(hosted("hasty"), answer="7")
    failure = hasty.answer([said("1")], False)
    assert failure["failed"] == "crash"
    assert "asks the model two things at once" in failure["message"]
    episode, _ = begun(hosted("guess"), answer="7")
    with pytest.raises(RuntimeError, match="the game was left"):
        episode.answer([said("I give up")], False)


def test_what_cannot_be_acted_in_is_refused() -> None:
    with pytest.raises(ToolError, match="has a reward of a whole group"):
        hosted("group")
    with pytest.raises(ToolError, match="cannot be loaded: KeyError: 'nowhere'"):
        hosted("nowhere")
    episode, _ = begun(hosted("forgetful"), answer="7")
    with pytest.raises(ToolError, match="asks the model without what was said before"):
        episode.answer([said("1")], False)


def test_a_tokenizer_without_a_chat_template_is_refused() -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(starter_folder()))
    config = EnvironmentConfig.model_validate({"verifiers": str(GAMES)})
    refused = pytest.raises(ConfigError, match="needs a chat template, but the tokenizer has none")
    with open_environments(config, tokenizer) as opened, refused:
        read_tools(opened, config, ChatConfig(), tokenizer, [1])


def test_the_dataset_of_an_environment_is_read_in_another_process() -> None:
    rows = load_rows(VerifiersData(environment=str(GAMES), options={"name": "sums"}, limit=2))
    assert [row.columns["answer"] for row in rows] == ["1", "2"]
    assert rows[1].prompt == (
        {"role": "system", "content": "Answer in <answer> tags."},
        {"role": "user", "content": "1 + 1 = ?"},
    )
    with pytest.raises(DataError, match=r"cannot be read: .*there is no file"):
        load_rows(VerifiersData(environment="nowhere.py"))
