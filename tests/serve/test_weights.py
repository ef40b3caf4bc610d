"""Weights that a trainer pushes to a running server, and pauses."""

import asyncio
import json
import os
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from isobit.cli.main import main
from isobit.models.config import Lora
from isobit.models.folder import load_model
from isobit.serve.errors import ApiError
from isobit.serve.weights import Sent, WeightUpdates, digest_of
from isobit.starter import starter_folder
from tests.serve.servers import KEY, Running, choices

ASKED: dict[str, Any] = {
    "model": "chatty", "prompt": ["3+8+2+9=", "1+1="], "n": 2, "seed": 7, "max_tokens": 24,
    "temperature": 1.3, "logprobs": 3, "return_token_ids": True,
}  # fmt: skip
LONG: dict[str, Any] = {
    "model": "chatty", "prompt": "1", "seed": 1, "ignore_eos": True, "max_tokens": 450,
}  # fmt: skip
BYTES = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/octet-stream"}
NEWER: Mapping[str, float] = {"model.norm.weight": 1.5, "model.layers.0.mlp.down_proj.weight": 0.7}
"""What other weights are multiplied by."""


def other_weights() -> dict[str, torch.Tensor]:
    tensors = load_file(starter_folder() / "model.safetensors")
    return {name: values * NEWER.get(name, 1.0) for name, values in tensors.items()}


def post(server: Running, path: str, body: Any = b"") -> dict[str, Any]:
    headers = BYTES if isinstance(body, bytes) and body else None
    status, _, content = server.ask(path, body, headers, method="POST")
    assert status == 200, content
    return json.loads(content)


def push(server: Running, path: str) -> dict[str, Any]:
    post(server, "/init_weight_transfer_engine", {"init_info": {}})
    post(server, "/start_weight_update")
    post(server, "/update_weights", {"update_info": {"path": path}})
    return post(server, "/finish_weight_update", {"weight_version": path})


def test_what_is_drawn_after_an_update_is_what_a_server_of_these_weights_draws(
    server: Running, tmp_path: Path
) -> None:
    """By a file; then back by bytes in two requests."""
    from tests.serve.test_server import drawn

    before = server.answer(ASKED)
    place, new = server.log.parent / "weights", other_weights()
    save_file(new, place / "new.safetensors")
    told = push(server, "new.safetensors")
    assert told["sha256"] == digest_of(new) and told["weight_version"] == "new.safetensors"
    assert json.loads(server.ask("/weight_info")[2])["sha256"] == told["sha256"]

    after = server.answer(ASKED)
    assert after["system_fingerprint"] == f"fp8-{told['version']}" != before["system_fingerprint"]
    shutil.copytree(starter_folder(), tmp_path / "new")
    save_file(new, tmp_path / "new" / "model.safetensors")
    started = load_model(tmp_path / "new", "fp8", trainable=False)
    found, sampling = choices(after), {"temperature": 1.3, "max_new_tokens": 24}
    for place_of, prompt in enumerate(ASKED["prompt"]):
        for one, expected in zip(
            found[2 * place_of :], drawn(started, 7, 2, prompt, **sampling), strict=False
        ):
            assert one["token_ids"] == list(expected.token_ids)
            assert one["logprobs"]["token_logprobs"] == list(expected.log_probs)
    assert found != choices(before)

    old = load_file(starter_folder() / "model.safetensors")
    names = sorted(old)
    post(server, "/start_weight_update", {"is_checkpoint_format": True})
    for part in (names[:3], names[3:]):
        save_file({name: old[name] for name in part}, tmp_path / "part")
        post(server, "/update_weights", (tmp_path / "part").read_bytes())
    assert post(server, "/finish_weight_update")["sha256"] == digest_of(old)
    assert choices(server.answer(ASKED)) == choices(before)


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_published_bytes_are_those_of_a_loaded_folder(precision: Any, tmp_path: Path) -> None:
    """Also where INT8 moves outstanding channels of norms into the matrices behind them."""
    new = other_weights()
    new["model.layers.0.input_layernorm.weight"][3] *= 50
    shutil.copytree(starter_folder(), tmp_path / "new")
    save_file(new, tmp_path / "new" / "model.safetensors")
    expected = load_model(tmp_path / "new", precision, trainable=False).policy
    policy = load_model("starter", precision, trainable=False).policy
    assert policy.checksum() != expected.checksum()
    updates = WeightUpdates(policy, None, tmp_path)  # type: ignore[arg-type]
    policy.republish(updates._masters(new))
    assert policy.checksum() == expected.checksum()


def test_a_pause_ends_what_is_in_flight_and_lets_others_wait(server: Running) -> None:
    found: list[tuple[int, dict[str, str], bytes]] = []
    long = threading.Thread(target=lambda: found.append(server.ask("/v1/completions", LONG)))
    long.start()
    server.wait_for("samples_live", 1)
    assert post(server, "/pause") == {"status": "paused"}
    long.join()
    status, headers, content = found.pop()
    assert status == 503 and b"generation was paused" in content
    assert int(headers["retry-after"]) > 0
    assert json.loads(server.ask("/is_paused")[2]) == {"is_paused": True}
    short = LONG | {"max_tokens": 1}
    later = threading.Thread(target=lambda: found.append(server.ask("/v1/completions", short)))
    later.start()
    server.wait_for("samples_in_place", 1)
    assert server.metrics()["isobit_samples_live"] == 0 and not found
    assert post(server, "/resume") == {"status": "resumed"}
    later.join()
    assert found[0][0] == 200


def test_what_is_refused_leaves_the_old_weights(server: Running) -> None:
    before, place = choices(server.answer(ASKED)), server.log.parent / "weights"
    tensors = other_weights()
    name = "model.norm.weight"
    for file, made in {
        "few": {name: tensors[name]}, "named": {"x": tensors[name]},
        "wide": {name: torch.ones(7)}, "nan": {name: tensors[name] * float("nan")},
        "bytes": {name: tensors[name].to(torch.int8)},
    }.items():  # fmt: skip
        save_file(made, place / f"{file}.safetensors")
    (place / "damaged.safetensors").write_bytes(b"\x08")
    post(server, "/start_weight_update")
    refused: list[tuple[str, Any, str]] = [
        ("/init_weight_transfer_engine", {"init_info": {"master_address": "x"}}, "not by NCCL"),
        ("/update_weights", {"update_info": {"names": [], "shapes": []}}, "leave names, shapes"),
        ("/start_weight_update", {"is_checkpoint_format": False}, "expected true"),
        ("/update_weights", {"update_info": {"path": "../server.log"}}, "is outside of"),
        ("/update_weights", {"update_info": {"path": "none"}}, "cannot be read"),
        ("/update_weights", {"update_info": {"path": "."}}, "neither model.safetensors nor"),
        ("/update_weights", {"update_info": {"path": "damaged.safetensors"}}, "is damaged"),
        ("/update_weights", {"update_info": {"path": "named.safetensors"}}, "no such tensor"),
        ("/update_weights", {"update_info": {"path": "wide.safetensors"}}, "has the shape (7,)"),
        ("/update_weights", {"update_info": {"path": "nan.safetensors"}}, "a NaN or an infinity"),
        ("/update_weights", {"update_info": {"path": "bytes.safetensors"}}, "expected one of"),
        ("/update_weights", b"\x00" * 9, "is damaged"),
        ("/pause?mode=soon", {}, "expected abort, wait or keep"),
    ]
    for path, body, why in refused:
        status, _, content = server.ask(path, body, BYTES if isinstance(body, bytes) else None)
        assert 400 <= status < 500 and why in json.loads(content)["error"]["message"], content
    post(server, "/update_weights", {"update_info": {"path": "few.safetensors"}})
    status, _, content = server.ask("/finish_weight_update", {})
    assert status == 400 and b"tensors have not come" in content
    for path in ("/pause", "/update_weights"):
        assert server.ask(path, {}, headers={})[0] == 401
    assert choices(server.answer(ASKED)) == before


def test_updates_need_a_key_and_a_folder(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SERVER_KEY", KEY)
    for arguments, why in (
        ([str(tmp_path)], "add --api-key env:NAME"),
        ([str(tmp_path / "none"), "--api-key", "env:SERVER_KEY"], "is no folder"),
        ([str(tmp_path), "--api-key", "env:SERVER_KEY", "--follow"], "name one"),
    ):
        assert main(["serve", "starter", "--allow-weight-updates", *arguments]) == 2
        assert why in " ".join(capsys.readouterr().err.split())


def updates_of(folder: Path) -> WeightUpdates:
    policy = load_model("starter", "fp8", trainable=False).policy
    return WeightUpdates(policy, None, folder)  # type: ignore[arg-type]


def sent(**body: Any) -> Sent:
    return Sent(bytearray(json.dumps(body).encode()), True, {})


def test_weights_that_are_never_read_keep_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that does not answer; a pipe is refused at once."""
    updates, stalled, going_on = updates_of(tmp_path), threading.Event(), threading.Event()

    def read(self: WeightUpdates, sent: Sent) -> dict[str, torch.Tensor]:
        stalled.set()
        going_on.wait()
        return {}

    async def ask() -> None:
        await updates._start(sent())
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(ApiError, match="is a named pipe, not a file"):
            await updates._update(sent(update_info={"path": "pipe"}))
        monkeypatch.setattr(WeightUpdates, "_read", read)
        waiting = asyncio.create_task(updates._update(sent()))
        await asyncio.to_thread(stalled.wait)
        await updates._start(sent())  # which another trainer asks for meanwhile
        going_on.set()
        with pytest.raises(ApiError, match="another update has begun"):
            await waiting
        going_on.clear()
        monkeypatch.setattr("isobit.serve.weights.READ_S", 0.01)
        with pytest.raises(ApiError, match=r"not read within 0\.01 s"):
            await updates._update(sent())

    asyncio.run(ask())  # would join a thread of the executor
    assert any(one.name == "isobit-weights" and one.daemon for one in threading.enumerate())
    going_on.set()


def test_adapters_are_updated_by_runs_alone(tmp_path: Path) -> None:
    updates = updates_of(tmp_path)
    object.__setattr__(updates.policy.config, "lora", Lora(4, 8.0, ("q_proj",)))
    with pytest.raises(ApiError, match="model has adapters"):
        asyncio.run(updates._update(sent()))


def test_a_run_pushes_no_numbers_that_nothing_can_be_computed_with(tmp_path: Path) -> None:
    runs = updates_of(tmp_path).runs
    name = "layers.0.qkv_proj.lora_A.weight"
    object.__setattr__(runs.policy, "shapes", {name: (4, 128)})
    for value in (1e38, float("nan")):
        with pytest.raises(ApiError, match="lora_A"):
            runs._apply({name: torch.full((4, 128), value, dtype=torch.bfloat16)})
    runs._apply({name: torch.ones(4, 128, dtype=torch.bfloat16)})
