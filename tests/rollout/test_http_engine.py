"""Servers elsewhere as the engine of a run: the bytes of the native one, whoever draws them and
whatever becomes of the servers.
"""

import json
import os
import signal
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from isobit.config.precision import PrecisionConfig, Preset
from isobit.config.recipes import RunConfig
from isobit.config.rules import check_run
from isobit.models.config import Experts
from isobit.models.folder import read_config
from isobit.models.policy import Policy, random_policy
from isobit.models.weight_deltas import SentWeights
from isobit.observe.console import silent
from isobit.records.text import Completion, SamplingParams
from isobit.rollout import episodes, servers
from isobit.rollout.answers import UnavailableError
from isobit.rollout.engine import Sampler, generate
from isobit.rollout.http_engine import HttpEngine
from isobit.rollout.requests import Handle, Request
from isobit.run.loop import train
from isobit.util.errors import (
    ConfigError,
    Interrupted,
    MismatchError,
    RequestError,
    ServerError,
)
from tests.rollout.served import engine_of, native_of, served
from tests.rollout.server_runs import check_a_killed_server, left, run_maker, two_servers
from tests.rollout.test_exactness import TINY, policy_of, requests
from tests.run import acting
from tests.serve.servers import KEY, Running
from tests.serve.test_runs import STEP, Client, counts, group


@pytest.fixture(scope="module")
def two() -> Iterator[list[str]]:
    """Servers of the tiny model in ``fp8``, of which one has few pages."""
    with served() as one, served(kv_pages=3, max_batched_tokens=37) as other:
        yield [one, other]


def changed_policy(preset: Preset = "fp8", **changes: Any) -> Policy:
    """One whose weights a test may change."""
    config = replace(TINY, **changes)
    return random_policy(config, PrecisionConfig(preset=preset), seed=1)


@torch.no_grad()
def change(policy: Policy, share: float = 0.01) -> None:
    """As an update does with a small learning rate."""
    generator = torch.Generator().manual_seed(policy.version)
    for master in policy.masters.values():
        moved = torch.rand(master.shape, generator=generator) < share
        master.mul_(1 + 0.1 * moved)
    policy.publish()


def stepped(engine: Sampler) -> dict[Handle, Completion]:
    """One step -> the samples that have ended in it."""
    return {one.handle: one.completion for one in engine.step() if one.completion}


def finished(engine: Sampler) -> dict[Handle, Completion]:
    found: dict[Handle, Completion] = {}
    while engine.num_live:
        found |= stepped(engine)
    return found


def drawn(engine: HttpEngine, tokens: int) -> dict[Handle, Completion]:
    """Step until so many tokens were heard of; -> the samples that have ended by then.  Servers go
    on meanwhile, so on a busy machine a step may hear of many tokens at once.
    """
    found: dict[Handle, Completion] = {}
    while engine.stats.generated_tokens < tokens:
        found |= stepped(engine)
    return found


def longer(wanted: Sequence[Request], tokens: int = 100) -> list[Request]:
    """Samples that a server does not end before a step has heard of their first tokens."""
    return [replace(one, sampling=replace(one.sampling, max_new_tokens=tokens)) for one in wanted]


@pytest.mark.few(1)
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9, "top_k": 20}])
def test_it_draws_what_the_native_engine_draws(two: list[str], filters: Mapping[str, Any]) -> None:
    """At two servers, one of which takes pages away; also log-probabilities behind filters."""
    policy, wanted = policy_of("fp8"), requests(**filters)
    wanted.append(replace(requests(0.0)[0], visit=~0))
    engine = engine_of(policy, *two)
    assert generate(engine, wanted) == generate(native_of(policy), wanted)
    assert (engine.num_running, engine.num_live) == (0, 0)
    assert engine.stats.generated_tokens == 220


@pytest.mark.few(1)
@pytest.mark.parametrize("preset", ["fp32", "bf16", "fp8-rollout", "int8", "int8-rollout"])
def test_servers_publish_the_bytes_of_the_trainer(preset: Preset) -> None:
    """Of masters that are no BF16 numbers, before and after an update."""
    policy, wanted = changed_policy(preset), requests()[:2]
    with served(preset) as server:
        engine, native = engine_of(policy, server), native_of(policy)
        for _ in range(2):
            change(policy)
            assert generate(engine, wanted) == generate(native, wanted)


@pytest.mark.exhaustive
def test_experts_are_drawn_with_their_routings() -> None:
    changes = {"family": "qwen3_moe", "experts": Experts(4, 2, 128, renormalise=True)}
    policy, wanted = changed_policy(**changes), requests()[:2]
    with served(config=replace(TINY, **changes)) as server:
        found = generate(engine_of(policy, server), wanted)
    assert found == generate(native_of(policy), wanted)
    assert all(one.routings for group in found for one in group)


@pytest.mark.exhaustive
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9, "top_k": 20}])
def test_a_run_that_was_killed_goes_on_with_what_servers_have_drawn(
    two: list[str], filters: Mapping[str, Any]
) -> None:
    """Each token is drawn once, at the server that has the tokens before it."""
    policy, wanted = policy_of("fp8"), longer(requests(**filters)[:3], 40)
    killed = engine_of(policy, *two, run="a run")
    killed.submit(wanted)
    before = [counts(Client(url)) for url in two]
    drawn(killed, 12)
    killed._board.close()  # without a word to the servers
    resumed = engine_of(policy, *reversed(two), run="a run")
    found = generate(resumed, wanted)
    assert found == generate(native_of(policy), wanted)
    after = [counts(Client(url)) for url in two]
    tokens = sum(one.length for group in found for one in group)
    assert sum(one[0] for one in after) - sum(one[0] for one in before) == tokens
    assert sum(one[1] for one in after) - sum(one[1] for one in before) >= 12
    assert resumed.stats.generated_tokens == tokens


@pytest.mark.exhaustive
def test_live_samples_go_on_with_new_weights(two: list[str]) -> None:
    """Each token keeps the version that drew it, and what follows is what a native engine draws
    behind these tokens.
    """
    policy = changed_policy()
    engine, wanted = engine_of(policy, *two), longer([replace(requests()[0], samples=4)])
    handles = engine.submit(wanted)[0]
    drawn(engine, 12)
    before = policy.version
    half_done = engine.withdraw(handles)
    change(policy)
    native = native_of(policy)
    for one in (engine, native):
        one.admit(wanted, half_done)
    found = finished(engine)
    assert found == finished(native)
    versions = [version for one in found.values() for version in one.weights_versions]
    assert {before, policy.version} == set(versions)
    engine.submit([replace(wanted[0], visit=1)])
    drawn(engine, 4)
    change(policy)
    last = [one.weights_versions for one in finished(engine).values()]
    assert all(list(one) == sorted(one) for one in last)
    assert any(len(set(one)) == 2 for one in last)
    assert engine.stats.weight_changes == 1 and engine.stats.update_s > 0


def test_an_update_sends_what_has_changed(two: list[str]) -> None:
    policy = changed_policy()
    engine = engine_of(policy, *two)
    engine.take_weights()
    assert [server.pushed[0][0] for server in engine._servers] == [True, True]
    all_bytes = engine._servers[0].pushed[0][1]
    change(policy)
    engine.take_weights()
    for server in engine._servers:
        ((is_whole, size, seconds),) = server.pushed
        assert not is_whole and 0 < size < 0.06 * all_bytes and seconds > 0
    assert sum("2 of 2 servers have acknowledged" in one for one in engine.notes()) == 2
    assert generate(engine, requests()) == generate(native_of(policy), requests())


def test_a_wrong_digest_has_all_weights_sent_and_a_second_one_ends_the_run(
    two: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = changed_policy()
    engine = engine_of(policy, two[0])
    engine.take_weights()
    files = SentWeights.files

    def damaged(self: SentWeights, base: str | None) -> Any:
        """A change loses one of its tensors."""
        tensors = self.change if base is not None else self.tensors
        name = "layers.0.down_proj.weight"
        less = {one: values for one, values in tensors.items() if not one.startswith(name)}
        return files(replace(self, change=less), base)

    monkeypatch.setattr(SentWeights, "files", damaged)
    change(policy)
    engine.take_weights()
    assert [is_whole for is_whole, _, _ in engine._servers[0].pushed] == [False, True]
    assert generate(engine, requests()) == generate(native_of(policy), requests())

    def wrong(self: SentWeights, base: str | None) -> Any:
        tensors = {one: values * 2 for one, values in self.tensors.items()}
        return files(replace(self, tensors=tensors), None)

    monkeypatch.setattr(SentWeights, "files", wrong)
    change(policy)
    with pytest.raises(MismatchError, match="have another digest there"):
        engine.take_weights()


def test_bytes_that_are_quantised_otherwise_are_noticed(
    two: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = changed_policy()
    engine = engine_of(policy, two[0])
    monkeypatch.setattr(policy, "checksum", lambda values: 1)
    with pytest.raises(MismatchError, match="quantised them to other bytes"):
        generate(engine, requests())


@pytest.mark.exhaustive
def test_half_done_samples_move_between_engines(two: list[str]) -> None:
    policy, wanted = policy_of("fp8"), longer(requests())
    expected = generate(native_of(policy), wanted)
    native, engine = native_of(policy), engine_of(policy, *two)
    handles = [one for group in native.submit(wanted) for one in group]
    for _ in range(3):
        native.step()
    engine.admit(wanted, native.withdraw(handles[:6]))
    found = drawn(engine, 5)
    native.admit(wanted, engine.withdraw(handles[:6]))
    found |= finished(native)
    assert [found[one] for one in handles] == [one for group in expected for one in group]


@pytest.mark.exhaustive
def test_stop_strings_and_aborts_end_samples(two: list[str]) -> None:
    policy, stops = policy_of("fp8"), ("a", "b", "c", "0", "1")
    stopped = [
        replace(one, sampling=replace(one.sampling, stop_strings=stops)) for one in requests()
    ]
    wanted = longer(stopped, 50)
    engine = engine_of(policy, *two)
    assert generate(engine, wanted) == generate(native_of(policy), wanted)
    (handles,) = engine.submit(longer(requests()[:1]))
    drawn(engine, 4)
    gone = engine.abort(handles)
    assert gone and {one.completion.finish_reason for one in gone if one.completion} == {"aborted"}
    assert (engine.num_live, engine.num_running) == (0, 0)
    assert generate(engine, wanted[1:]) == generate(native_of(policy), wanted[1:])


def test_it_has_room_for_as_many_samples_as_servers_will_take_at_the_next_step() -> None:
    """Who submits while there is room would else give one group a step."""
    policy, (first, *_) = policy_of("fp8"), requests()
    with served(places=5) as one, served(max_sequences=2) as other:
        engine = engine_of(policy, one, other)
        generate(engine, [first])
        count = 0
        while engine.has_room:
            engine.submit([replace(first, visit=first.visit + 1 + count, samples=1)])
            count += 1
        assert count == 5 + 3
        finished(engine)
        assert engine.has_room


@pytest.mark.exhaustive
def test_samples_beyond_the_places_of_servers_wait() -> None:
    policy, wanted = policy_of("fp8"), [replace(one, samples=7) for one in requests()]
    with served(places=5) as one, served(max_sequences=2) as other:
        engine = engine_of(policy, one, other)
        engine.submit(wanted)
        most = 0
        while engine.num_live:
            engine.step()
            most = max(most, engine.num_running)
        assert most == 5 + 3
        assert generate(engine, wanted) == generate(native_of(policy), wanted)


@pytest.mark.exhaustive
def test_a_server_whose_places_others_have_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of our own samples that have ended are free meanwhile."""
    monkeypatch.setattr(servers, "FULL_S", 0.01)
    policy, wanted = policy_of("fp8"), [replace(one, samples=2) for one in requests()[:3]]
    with served(places=4) as server:
        engine = engine_of(policy, server)
        engine.take_weights()
        assert engine._weights is not None
        step = {**STEP, "weights": engine._weights.digest}
        Client(server).get("step", {**step, "ask": [group(3, [1, 2], max_new_tokens=250)]})
        assert generate(engine, wanted) == generate(native_of(policy), wanted)


@pytest.mark.exhaustive
def test_a_server_that_comes_back_as_another_is_left_out() -> None:
    policy = changed_policy()
    with served() as stays, ExitStack() as stack:
        engine = engine_of(policy, stays, leaves := stack.enter_context(served()))
        engine.take_weights()
        stack.close()
        engine.submit(requests())
        finished(engine)
        with served("bf16", port=int(leaves.rpartition(":")[2])):
            while not any("another precision flow" in one for one in engine.notes()):
                engine.submit([replace(requests()[3], visit=engine._numbered)])
                finished(engine)
        assert not engine._servers[1].is_up


@pytest.mark.exhaustive
def test_a_server_is_lost_and_comes_back() -> None:
    """Its samples go on at the other; when it is there again it gets all weights, and samples."""
    policy, wanted = changed_policy(), longer([replace(one, samples=6) for one in requests()])
    with served() as stays, ExitStack() as stack:
        leaves = stack.enter_context(served())
        engine = engine_of(policy, stays, leaves)
        engine.submit(wanted)
        found = drawn(engine, 30)
        assert all(load.samples for load in engine._loads.values())
        stack.close()
        found |= finished(engine)
        for request, group in zip(wanted, generate(native_of(policy), wanted), strict=True):
            for sample, one in enumerate(group):
                assert found[Handle(request.prompt.id, 0, sample)] == one
        change(policy)
        engine.take_weights()
        said = engine.notes()
        assert any(f"{leaves} is down" in one for one in said)
        assert any("1 of 2 servers have acknowledged" in one for one in said)
        with served(port=int(leaves.rpartition(":")[2])):
            again, visit = engine._servers[1], 0
            while not engine._loads[again].samples:
                visit += 1
                engine.submit([replace(requests()[0], visit=visit)])
                engine.step()
            assert again.pushed[-1][0], "all weights"
            finished(engine)
            assert any(f"{leaves} samples" in one for one in engine.notes())


@pytest.mark.exhaustive
def test_a_server_that_came_up_after_the_engine_has_sizes_before_it_draws() -> None:
    """It did not answer when it was asked first, and does when it is given the weights."""
    policy, wanted = policy_of("fp8"), requests()
    with served() as stays:
        with served() as later:
            port = int(later.rpartition(":")[2])
        engine = engine_of(policy, stays, later)
        assert any(f"{later} does not answer yet" in one for one in engine.notes())
        with served(port=port):
            engine.take_weights()
            while not engine._servers[1].is_up:
                sleep(0.01)
            assert generate(engine, wanted) == generate(native_of(policy), wanted)


@pytest.mark.exhaustive
@pytest.mark.parametrize("pages", [1, 2])
def test_a_server_that_comes_later_draws_what_its_cache_holds(pages: int) -> None:
    """It has a smaller one than those that answered when the engine was made; the others go on with
    what is too long for it.
    """
    policy = policy_of("fp8")
    wanted = [replace(one, samples=3) for one in (*longer(requests()[:2]), *requests())]
    wanted = [replace(one, visit=visit) for visit, one in enumerate(wanted)]
    with served() as stays:
        with served() as later:
            port = int(later.rpartition(":")[2])
        engine = engine_of(policy, stays, later)
        with served(port=port, kv_pages=pages):
            engine.take_weights()
            while not engine._servers[1].is_up:
                sleep(0.01)
            assert generate(engine, wanted) == generate(native_of(policy), wanted)
            assert engine._servers[1].is_up and not any("is down" in one for one in engine.notes())


def test_a_run_without_servers_ends_with_their_names() -> None:
    policy = policy_of("fp8")
    with served() as server:
        engine = engine_of(policy, server)
        engine.submit(longer(requests()))
        drawn(engine, 3)
    engine._patience_s = 0.5  # not before: on a busy machine a server draws nothing for so long
    with pytest.raises(ServerError, match=rf"none is up \({server}: .*--resume"):
        finished(engine)
    assert engine.num_live == 0


def test_what_a_server_cannot_draw_ends_the_run(
    two: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = policy_of("fp8")
    engine = engine_of(policy, *two)
    with pytest.raises(RequestError, match="the KV cache has 3"):
        engine.submit([replace(requests()[0], sampling=SamplingParams(200))])
    with pytest.raises(RequestError, match="followed to their end alone"):
        engine.submit(requests(), "tokens")
    monkeypatch.setattr(servers.AskedSamples, "body", lambda self: {"numbers": [1]})
    with pytest.raises(ServerError, match=r"/isobit/step answers with 400: ask\.0\.token_ids"):
        generate(engine, requests())


def test_two_addresses_of_one_server_are_refused(two: list[str]) -> None:
    """Of which each would have its weights, and end what the other sends."""
    one, other = two
    again = one.replace("127.0.0.1", "localhost")
    with pytest.raises(ConfigError, match=f"one server twice, as {one} and {again}; name each"):
        engine_of(policy_of("fp8"), one, other, again)


def test_other_servers_are_refused_by_what_they_differ_in(two: list[str]) -> None:
    def refused(match: str, *urls: str, policy: Policy | None = None, **keys: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            engine_of(policy or policy_of("fp8"), *urls, **keys)

    refused("another precision flow: is .*bf16", two[0], policy=policy_of("bf16"))
    refused(
        "another model: num_layers is 2, and the run's 3", two[0],
        policy=random_policy(replace(TINY, num_layers=3), "fp8", 0),
    )  # fmt: skip
    refused("none of rollout.servers answers .*refused", "http://127.0.0.1:9")
    with served(key="secret") as server:
        refused("refuses the key", server, key="other")
        assert engine_of(policy_of("fp8"), server, key="secret").num_live == 0
    with served(updates=False) as server:
        refused("takes no weights of a run", server)


@pytest.fixture(scope="module")
def processes(
    tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Running]]:
    with ExitStack() as stack:
        places = [tmp_path_factory.mktemp("server") for _ in range(2)]
        yield two_servers(stack, tiny_folder, places, "--max-live", "9")


@pytest.fixture
def make_run(
    make_config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., RunConfig]:
    monkeypatch.setenv("SERVER_KEY", KEY)
    return run_maker(make_config, tmp_path)


TOOLS = Path(__file__).parents[1] / "environments" / "tools.py"
STOPS = list(string.ascii_letters[:40])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("engine", "sections"),
    [
        ("lag", {"async": {"lag": 1}}),
        ("ppo", {"algorithm": {"name": "ppo"}, "rollout": {"top_k": 30}}),
        (
            "episodes",
            {
                "environment": {"class": f"{TOOLS}:Counter", "max_turns": 6},
                "rollout": {"max_new_tokens": 60, "stop_tokens": STOPS},
            },
        ),
    ],
)
def test_runs_of_other_kinds_leave_the_bytes_of_native_ones(
    engine: str,
    sections: dict[str, Any],
    make_run: Callable[..., RunConfig],
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SentWeights that sample behind those that learn; a value head, which is not sent; turns that
    begin with what tools have said.
    """
    monkeypatch.setattr(episodes, "read_turn", acting.reading(acting.parse))
    with (
        served(config=read_config(tiny_folder)) as one,
        served(config=read_config(tiny_folder)) as two,
    ):
        native = make_run("native", **sections)
        own = {"engine": "http", "servers": [one, two]}
        other = make_run("http", **sections | {"rollout": sections.get("rollout", {}) | own})
        train(native, silent())
        train(other, silent())
    found = left(tmp_path / "http")
    assert found == left(tmp_path / "native")
    if engine == "episodes":
        turns = [line["episode/turns"] for line in found["metrics"] if "episode/turns" in line]
        assert min(turns) > 1.5


@pytest.mark.exhaustive
def test_a_run_by_servers_leaves_the_bytes_of_a_native_one_though_one_is_killed(
    processes: list[Running], make_run: Callable[..., RunConfig], tmp_path: Path
) -> None:
    check_a_killed_server(make_run, processes, tmp_path)
    manifest = json.loads((tmp_path / "servers" / "run.json").read_text())
    assert manifest["precision"]["exact"] is True and KEY not in json.dumps(manifest)


@pytest.mark.exhaustive
def test_a_run_that_waits_for_its_servers_between_two_steps_stops_on_a_signal(
    make_run: Callable[..., RunConfig], tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them can take the weights of the first step."""
    push = servers.Server._push

    def push_first(self: servers.Server, weights: Any) -> None:
        if weights.version == 1:
            return push(self, weights)
        os.kill(os.getpid(), signal.SIGTERM)
        raise UnavailableError("connection refused")

    monkeypatch.setattr(servers.Server, "_push", push_first)
    with served(config=read_config(tiny_folder)) as one:
        rollout = {"engine": "http", "servers": [one], "servers_timeout_s": 4.0}
        config = make_run("http", rollout=rollout)
        with pytest.raises(Interrupted, match="SIGTERM"):
            train(config, silent())
    assert (config.output / "checkpoints" / "step_000001").is_dir()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"rollout": {"engine": "http"}}, "servers and server_key say where it samples"),
        ({"rollout": {"servers": ["http://a:1"]}}, "servers and server_key say where it samples"),
        ({"rollout": {"server_key": "env:KEY"}}, "servers and server_key say where it samples"),
        ({"rollout": {"engine": "http", "servers": ["http://a:1"] * 2}}, "names a server twice"),
        (
            {"rollout": {"engine": "http", "servers": ["http://a:1", "http://A:1/"]}},
            "names a server twice",
        ),
        (
            {
                "rollout": {"engine": "http", "servers": ["http://a:1"]},
                "precision": {"preset": "fp8", "kv_scales": "per_tensor"},
            },
            "not sent to servers",
        ),
        (
            {"rollout": {"engine": "http", "servers": ["http://a:1"], "server_key": "env:NO_KEY"}},
            "the environment has no variable NO_KEY",
        ),
    ],
)
def test_recipes_that_contradict_it_are_refused(
    make_config: Callable[..., RunConfig], sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(make_config(**sections))


def test_rollouters_and_servers_are_one_too_many(make_config: Callable[..., RunConfig]) -> None:
    config = make_config(
        rollout={"engine": "http", "servers": ["http://a:1"]},
        cluster={"processes": 2, "rollouters": 1},
        **{"async": {"lag": 1}},
    )
    with pytest.raises(ConfigError, match="which sample instead of it"):
        check_run(config)


@pytest.mark.parametrize(
    "address", ["host:8000", "ws://host:8000", "http://host:8000/v1", "http://"]
)
def test_addresses_of_another_form_are_refused(
    make_config: Callable[..., RunConfig], address: str
) -> None:
    with pytest.raises(ValidationError, match="match pattern"):
        make_config(rollout={"engine": "http", "servers": [address]})
