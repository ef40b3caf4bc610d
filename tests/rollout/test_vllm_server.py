"""vLLM's servers as the engine of a run, by a stand-in for their routes (docs/engines.md)."""

import json
import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from isobit.config.precision import PrecisionConfig
from isobit.config.recipes import RunConfig
from isobit.config.rollout import RunRolloutConfig
from isobit.models.config import Experts
from isobit.models.folder import read_config
from isobit.models.policy import Policy, random_policy
from isobit.records.text import SamplingParams
from isobit.rollout import vllm_server
from isobit.rollout.engine import generate
from isobit.rollout.vllm_model import Worker
from isobit.rollout.vllm_server import VllmServers, start_command
from isobit.run.loop import train
from isobit.util.errors import (
    ConfigError,
    MismatchError,
    NonFiniteError,
    RequestError,
    ServerError,
    StorageError,
)
from tests.rollout import fake_vllm
from tests.rollout.fake_vllm_server import VllmServe, vllm_served
from tests.rollout.test_exactness import requests
from tests.rollout.test_http_engine import drawn, finished, longer
from tests.rollout.test_sequence import BYTES
from tests.rollout.test_vllm_engine import WHOLE, apart, policy_of, sharpen
from tests.tiny import json_lines, tiny_model

SERVER = "isobit.rollout.vllm_model.Worker"


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm.install(monkeypatch)
    monkeypatch.setattr(vllm_server, "GATHER_S", 0.002)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "weights"


def described(policy: Policy, folder: Path) -> Path:
    start_command(policy, folder, Path("tokenizer"))
    return folder


def engine_of(policy: Policy, folder: Path, *servers: str, **keys: Any) -> VllmServers:
    key = keys.pop("key", None)
    config = RunRolloutConfig(engine="vllm", servers=servers, weights_folder=folder, **keys)
    return VllmServers(policy, config, key, BYTES, Path("tokenizer"))


def changing_policy(preset: str = "bf16", **sizes: Any) -> Policy:
    precision = PrecisionConfig.model_validate(preset)
    policy = random_policy(tiny_model(**sizes), precision, seed=1)
    sharpen(policy)
    return policy


@pytest.mark.few(1)
@pytest.mark.parametrize("preset", ["bf16", "fp8-rollout", "fp8-linear"])
def test_it_samples_from_the_published_weights(preset: Any, folder: Path) -> None:
    """By two servers; what is recorded is near the trainer's own, with all samples done."""
    policy, wanted = policy_of(preset, **WHOLE), requests()
    given = {"calculate_kv_scales": preset == "fp8-rollout"}
    at = described(policy, folder)
    with vllm_served(at, **given) as (one, first), vllm_served(at, **given) as (two, second):
        engine = engine_of(policy, folder, one, two)
        groups = generate(engine, wanted)
        notes = engine.notes()
    lengths = [[one.length for one in group] for group in groups]
    assert lengths == [[20] * 3, [12] * 2, [4] * 2, [25] * 2, [9] * 2]
    assert apart(policy, wanted, groups) < 0.06
    assert first.asked and second.asked
    quantised = [name for name in first.worker.model.loaded if name.endswith("_inv")]
    assert len(quantised) == (0 if preset == "bf16" else 14)
    assert any("2 of 2 servers have loaded" in one for one in notes)
    scaled = sum("has new scales in 2 layers: Q " in one for one in notes)
    assert scaled == (2 if preset == "fp8-rollout" else 0)
    assert (engine.num_running, engine.num_live) == (0, 0)
    assert engine.stats.generated_tokens == 160
    assert first.running == second.running == 0
    versions = {one for group in groups for each in group for one in each.weights_versions}
    assert versions == {policy.version}


@pytest.mark.exhaustive
def test_an_update_pauses_the_server_and_live_samples_go_on(folder: Path) -> None:
    """Each token has the version that drew it; the file of the version before is gone."""
    policy = changing_policy()
    with vllm_served(described(policy, folder)) as (url, server):
        engine = engine_of(policy, folder, url)
        engine.submit(longer([replace(requests()[0], samples=2)]))
        drawn(engine, 8)
        before = policy.version
        sharpen(policy)
        found = finished(engine)
        versions = [one.weights_versions for one in found.values()]
        assert all(len(one) == 100 and list(one) == sorted(one) for one in versions)
        assert {before, policy.version} == {one for each in versions for one in each}
        assert engine.stats.weight_changes == 1 and engine.stats.update_s > 0
        assert engine.stats.recomputed_tokens >= 8
        updates = ["/pause", "isobit_update", "/reset_prefix_cache", "/resume"]
        assert [one for one in server.calls if one in updates] == 2 * updates
        files = [one.name for one in folder.glob("*.safetensors")]
        assert len(files) == 1 and files[0].startswith(f"weights-{policy.version}-")
        engine.take_weights()
        assert server.calls.count("isobit_update") == 2


@pytest.mark.exhaustive
@pytest.mark.parametrize(("calibration", "again"), [("engine", 2), ("never", 1)])
def test_scales_of_the_cache_are_made_again_or_kept(
    calibration: str, again: int, folder: Path
) -> None:
    precision = {"preset": "fp8-rollout", "kv_scales": "per_tensor", "kv_calibration": calibration}
    policy = random_policy(tiny_model(**WHOLE), PrecisionConfig.model_validate(precision), seed=1)
    found: list[list[float]] = []
    with vllm_served(described(policy, folder), calculate_kv_scales=True) as (url, server):
        engine = engine_of(policy, folder, url)
        for _ in range(2):
            sharpen(policy)
            generate(engine, requests()[:2])
            found.append([float(one._k_scale) for one in server.worker.model.attentions])
        assert server.worker.model_runner.calculate_kv_scales
    assert sum("has new scales in 2 layers" in one for one in engine.notes()) == again
    assert (found[0] == found[1]) == (calibration == "never")


def test_scales_that_are_not_finite_end_the_rollout(folder: Path) -> None:
    policy = changing_policy("fp8-rollout", **WHOLE)
    with vllm_served(described(policy, folder), calculate_kv_scales=True) as (url, server):
        server.worker.model.attentions[1].range.fill_(0.0)
        with pytest.raises(NonFiniteError, match=r"inf.* in layer 1, which must be positive"):
            generate(engine_of(policy, folder, url), requests())


def test_weights_that_do_not_arrive_are_noticed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one tensor stays what it was; and where the server reads other bytes."""
    policy = changing_policy()
    with vllm_served(described(policy, folder)) as (url, server):
        engine = engine_of(policy, folder, url)
        generate(engine, requests()[:1])
        fake_vllm.lose_one(monkeypatch, server.worker.model)
        sharpen(policy)
        with pytest.raises(MismatchError, match=r"vLLM's model\.layers\.0\.mlp\.down_proj\.weight"):
            generate(engine, requests()[:1])
        assert engine.num_live == 0 and not server.is_paused
        monkeypatch.undo()
        fake_vllm.install(monkeypatch)
        update = Worker.isobit_update

        def damaged(self: Worker, asked: str) -> Any:
            path = Path(json.loads(asked)["path"])
            tensors = load_file(path)
            save_file({name: one * 2 for name, one in tensors.items()}, path)
            return update(self, asked)

        monkeypatch.setattr(Worker, "isobit_update", damaged)
        engine = engine_of(policy, folder, url)
        with pytest.raises(MismatchError, match="has read other bytes from"):
            generate(engine, requests()[:1])


def test_a_folder_that_the_server_has_not_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = changing_policy()
    update = Worker.isobit_update

    def elsewhere(self: Worker, asked: str) -> Any:
        order = json.loads(asked)
        return update(self, json.dumps({**order, "path": "/nowhere" + order["path"]}))

    monkeypatch.setattr(Worker, "isobit_update", elsewhere)
    with vllm_served(described(policy, folder)) as (url, server):
        with pytest.raises(ServerError, match=r"cannot load .*under the same path"):
            generate(engine_of(policy, folder, url), requests()[:1])
        assert not server.is_paused
    file = folder / "file"
    file.touch()
    with pytest.raises(StorageError, match=r"rollout\.weights_folder cannot be written"):
        engine_of(policy, file, url)


@pytest.mark.exhaustive
def test_a_server_is_lost_and_comes_back(folder: Path) -> None:
    """Its samples go on at the other behind the tokens that were heard of."""
    policy = changing_policy()
    at = described(policy, folder)
    with vllm_served(at) as (stays, _), ExitStack() as stack:
        leaves, _ = stack.enter_context(vllm_served(at))
        engine = engine_of(policy, folder, stays, leaves)
        engine.submit(longer([replace(one, samples=4) for one in requests()]))
        found = drawn(engine, 30)
        assert all(load.samples for load in engine._loads.values())
        stack.close()
        found |= finished(engine)
        assert [one.length for one in found.values()] == [100] * 20
        assert engine.stats.recomputed_tokens > 0
        assert any(f"{leaves} is down" in one for one in engine.notes())
        with vllm_served(at, port=int(leaves.rpartition(":")[2])) as (_, server):
            visit = 0
            while not server.asked:
                visit += 1
                engine.submit([replace(one, visit=visit) for one in requests()])
                finished(engine)
            assert "isobit_update" in server.calls
            assert any(f"{leaves} samples" in one for one in engine.notes())


@pytest.mark.exhaustive
def test_samples_that_others_end_are_drawn_on(folder: Path) -> None:
    """Who pauses the server ends them; it is paused no longer once it has the weights again."""
    policy = changing_policy()
    with vllm_served(described(policy, folder)) as (url, server):
        engine = engine_of(policy, folder, url)
        engine.submit(longer(requests()[:1]))
        drawn(engine, 4)
        server.pauses, server.is_paused = server.pauses + 1, True
        assert sorted(one.length for one in finished(engine).values()) == [100] * 3
        assert not server.is_paused and server.calls.count("isobit_update") == 2


@pytest.mark.exhaustive
def test_stop_strings_and_aborts_end_samples_here(folder: Path) -> None:
    """Each such sample has a stream of its own, which is closed; so have greedy ones."""
    policy = policy_of("bf16")
    stops = ("a", "b", "c", "d", "e", "0", "1")
    wanted = [
        replace(one, sampling=replace(one.sampling, stop_strings=stops, max_new_tokens=100))
        for one in requests()
    ]
    with vllm_served(described(policy, folder), max_num_seqs=32) as (url, server):
        engine = engine_of(policy, folder, url)
        handles = [one for group in engine.submit(wanted) for one in group]
        (gone,) = engine.abort(handles[:1])
        assert gone.completion is not None and gone.completion.finish_reason == "aborted"
        found = finished(engine)
        assert len(found) == len(handles) - 1
        assert any(one.finish_reason == "stop" for one in found.values())
        assert all(set(one.text).isdisjoint("abcde01") for one in found.values())
        assert {one["n"] for one in server.asked} == {1}
        generate(engine, requests(0.0)[:1])
        assert {one["n"] for one in server.asked} == {1}
        generate(engine, requests()[:1])
        assert server.asked[-1]["n"] == 3
        while server.running:
            engine.step()


def test_log_probabilities_of_nothing_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = policy_of("bf16")

    def impossible(self: VllmServe, tokens: list[int], temperature: float) -> float:
        tokens.append(1)
        return -9999.0

    monkeypatch.setattr(VllmServe, "draw", impossible)
    said = pytest.raises(NonFiniteError, match="gave the log-probability -inf for token 1")
    with vllm_served(described(policy, folder)) as (url, _), said:
        generate(engine_of(policy, folder, url), requests())


def test_what_it_cannot_serve_is_refused(folder: Path) -> None:
    policy = policy_of("bf16")
    with vllm_served(described(policy, folder)) as (url, _):
        engine = engine_of(policy, folder, url)
        with pytest.raises(RequestError, match=r"top_k, top_p or min_p"):
            engine.submit([replace(requests()[0], sampling=SamplingParams(4, 1.0, top_p=0.9))])
        with pytest.raises(RequestError, match="followed to their end alone"):
            engine.submit(requests(), "tokens")
    with pytest.raises(ConfigError, match="flows bf16, fp8, fp8-linear and fp8-rollout"):
        engine_of(policy_of("int8"), folder, url)
    with pytest.raises(ConfigError, match="with experts"):
        engine_of(policy_of("bf16", family="mixtral", experts=Experts(4, 2, 64, True)), folder, url)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"logprobs_mode": "raw_logprobs"}, "other log-probabilities: logprobs_mode is "),
        ({"world_size": 2}, "its model on several GPUs: world is 2, and the run's 1"),
        ({"calculate_kv_scales": True}, "another KV cache: makes_scales is True"),
    ],
)
def test_other_servers_are_refused_with_the_command_that_starts_one(
    folder: Path, given: dict[str, Any], match: str
) -> None:
    policy = policy_of("bf16")
    said = pytest.raises(ConfigError, match=rf"{match}.*VLLM_SERVER_DEV_MODE=1 vllm serve ")
    with vllm_served(described(policy, folder), **given) as (url, _), said:
        engine_of(policy, folder, url)


def test_other_models_keys_and_programs_are_refused(folder: Path) -> None:
    def refused(match: str, policy: Policy, *urls: str, **keys: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            engine_of(policy, folder, *urls, **keys)

    one, fp8 = policy_of("bf16", **WHOLE), policy_of("fp8-linear", **WHOLE)
    with vllm_served(described(one, folder)) as (url, server):
        refused("other matrices in E4M3", fp8, url)
        refused("another vocabulary", policy_of("bf16", vocab_size=96, **WHOLE), url)
        server.has_dev_mode = False
        refused("is no server of vLLM in development mode", one, url)
        server.has_dev_mode = True
        delattr(server.worker, "model")
        refused("worker that does not answer isobit_describe", one, url)
    refused(
        r"none of rollout\.servers answers .*--worker-extension-cls isobit", one,
        "http://127.0.0.1:9",
    )  # fmt: skip
    with vllm_served(described(one, folder), key="secret") as (url, _):
        refused("refuses the key", one, url, key="other")
        assert generate(engine_of(one, folder, url, key="secret"), requests()[:1])


def test_the_command_says_what_the_flow_needs(folder: Path) -> None:
    def command(preset: str, **keys: Any) -> str:
        precision = PrecisionConfig.model_validate({"preset": preset, **keys})
        policy = random_policy(tiny_model(**WHOLE), precision, seed=1)
        return start_command(policy, folder, Path("/models/mine"))

    plain, cached = command("fp8-linear"), command("fp8")
    assert f"vllm serve {folder} --load-format dummy --tokenizer /models/mine" in plain
    assert f"--worker-extension-cls {SERVER}" in plain and "--kv-cache-dtype" not in plain
    assert cached.startswith("VLLM_SERVER_DEV_MODE=1 VLLM_USE_V2_MODEL_RUNNER=0 vllm serve")
    assert cached.endswith("--kv-cache-dtype fp8 --calculate-kv-scales")
    assert command("fp8", first_layers_bf16=1).endswith("--kv-cache-dtype-skip-layers 0")
    described = json.loads((folder / "config.json").read_text())
    assert described["quantization_config"]["quant_method"] == "fp8"


def test_a_run_by_vllms_servers(
    make_config: Callable[..., RunConfig],
    tiny_folder: Path,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two steps; the first start has no server yet, and says how to start one."""

    def config(*urls: str) -> RunConfig:
        rollout = {"engine": "vllm", "servers": urls, "weights_folder": folder}
        return make_config(rollout=rollout, precision="bf16")

    with pytest.raises(ConfigError, match=r"start them with `VLLM_SERVER_DEV_MODE=1") as refused:
        train(config("http://127.0.0.1:9"))
    tokenizer = re.search(r"--tokenizer (\S+)", str(refused.value))
    assert tokenizer is not None and Path(tokenizer[1]).samefile(tiny_folder)
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == (
        read_config(tiny_folder).num_drawn
    )
    with vllm_served(folder) as (url, _):
        run = config(url)
        assert [one.type for one in run.corrections] == ["tis"]
        train(run)
    said = capsys.readouterr().out
    assert f"vllm 0.25.1 samples at {url}, with weights and kernels of its own" in said
    assert said.count("equal to what is published") == 2  # before each step
    rows = [row for row in json_lines(run.output / "metrics.jsonl") if "mismatch/k3" in row]
    assert len(rows) == 2
    assert all(0 < row["log_prob_diff/mean"] < 0.05 for row in rows)
    manifest = json.loads((run.output / "run.json").read_text())
    assert manifest["precision"]["exact"] is False
    assert manifest["engine"]["engine"] == "vllm 0.25.1"


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"engine": "vllm", "servers": ["http://a:1"]}, "need a folder"),
        ({"engine": "vllm", "weights_folder": "/tmp/w"}, "need a folder"),
        (
            {"engine": "http", "servers": ["http://a:1"], "weights_folder": "/tmp/w"},
            "vLLM's servers, and no others",
        ),
        (
            {
                "engine": "vllm",
                "servers": ["http://a:1"],
                "weights_folder": "/tmp/w",
                "engine_options": {"enforce_eager": True},
            },
            "'vllm' with servers; leave them out",
        ),
        ({"engine": "vllm", "server_key": "env:KEY"}, "servers and server_key say where"),
    ],
)
def test_recipes_that_contradict_it_are_refused(
    make_config: Callable[..., RunConfig], rollout: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(make_config(rollout=rollout))


def test_the_policy_is_not_changed_by_what_is_sent(folder: Path) -> None:
    policy = policy_of("fp8-linear", **WHOLE)
    before = policy.checksum()
    with vllm_served(described(policy, folder)) as (url, server):
        generate(engine_of(policy, folder, url), requests()[:1])
        name = "model.layers.0.mlp.down_proj.weight"
        matrix = policy.weights("rollout").linears["layers.0.down_proj"].matrix
        assert not isinstance(matrix, torch.Tensor)
        sent = server.worker.model.loaded[name].view(torch.uint8)
        assert torch.equal(sent, matrix.values.view(torch.uint8))
    assert policy.checksum() == before
