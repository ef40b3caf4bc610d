"""Exports of runs and folders: what is in them, where they may go, and what a fault leaves."""

import base64
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from isobit.cli.main import main
from isobit.commands.export import export, find_source
from isobit.config.model_shape import Family
from isobit.config.precision import PrecisionConfig
from isobit.config.recipes import RunConfig
from isobit.data.tokenizer import load_tokenizer
from isobit.models.checkpoint import FolderCheckpoint
from isobit.models.folder import load_policy, read_any_config
from isobit.models.policy import random_policy
from isobit.models.safetensors import INDEX_FILE, WEIGHTS_FILE
from isobit.models.saving import PolicyTensors, save_policy
from isobit.precision.quant_tensor import Int8Rows, QuantTensor
from isobit.proof.verify import VerifyOptions, verify
from isobit.run.loop import train
from isobit.starter import starter_folder
from isobit.util import disk_space
from isobit.util import files as storage
from isobit.util.errors import CheckpointError, ConfigError, ModelError, StorageError
from tests.models.policies import delta_nets, disturbed
from tests.tiny import TINY

MakeConfig = Callable[..., RunConfig]
Lines = list[str]


@pytest.fixture
def lines() -> Lines:
    return []


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def same_tensors(one: Path, other: Path) -> bool:
    a, b = read_folder(one), read_folder(other)
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and torch.equal(raw(a[name]), raw(b[name])) for name in a
    )


def test_a_folder_exported_and_imported_has_the_same_bytes(
    tiny_folder: Path, tmp_path: Path, lines: Lines
) -> None:
    result = export(
        find_source(tiny_folder, None, lines.append), tmp_path / "out", shard_bytes=75_000
    )
    out = result.folder
    assert result.files == len(list(out.glob("model-*.safetensors"))) > 2
    assert same_tensors(tiny_folder, out)
    index = json.loads((out / INDEX_FILE).read_text())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in read_folder(out).values())
    for name in (
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    ):
        assert (out / name).read_bytes() == (tiny_folder / name).read_bytes(), name
    again = export(find_source(out, None, lines.append), tmp_path / "again").folder
    assert (again / WEIGHTS_FILE).read_bytes() == (tiny_folder / WEIGHTS_FILE).read_bytes()
    assert load_tokenizer(out).vocab_size == load_tokenizer(tiny_folder).vocab_size
    assert not list(tmp_path.glob(".*")), "nothing hidden is left"
    assert not lines


def test_the_card_has_the_hash_of_every_file(
    tiny_folder: Path, tmp_path: Path, lines: Lines
) -> None:
    out = export(
        find_source(tiny_folder, None, lines.append), tmp_path / "out", shard_bytes=75_000
    ).folder
    card = (out / "README.md").read_text()
    found = dict(re.findall(r"\| `([^`]+)` \| `([0-9a-f]{64})` \|", card))
    others = {file.name: file for file in out.iterdir() if file.name != "README.md"}
    assert found == {
        name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in others.items()
    }


def test_a_run_and_its_checkpoints(
    make_config: MakeConfig, write_reward: Callable[[str], str], tmp_path: Path, lines: Lines
) -> None:
    """A finished run gives its model, a step its checkpoint; FP8 bytes of both are the policy's."""
    reward = write_reward("return float(sum(completion.token_ids) % 3)")
    config = make_config(reward, checkpoint={"every": 1}, evaluation={"every": 1})
    train(config)
    run = config.output
    finished = export(find_source(run, None, lines.append), tmp_path / "finished").folder
    assert same_tensors(finished, run / "model")
    last = export(find_source(run, 2, lines.append), tmp_path / "last").folder
    assert same_tensors(last, run / "model")
    first = export(find_source(run, 1, lines.append), tmp_path / "first").folder
    masters = load_file(run / "checkpoints" / "step_000001" / "masters.safetensors")
    embedding = masters["embed_tokens.weight"].bfloat16()
    assert torch.equal(read_folder(first)["model.embed_tokens.weight"], embedding)
    assert not same_tensors(first, last)
    fp8 = export(find_source(run, None, lines.append), tmp_path / "fp8", "fp8").folder
    of_step = export(find_source(run, 2, lines.append), tmp_path / "fp8-step", "fp8").folder
    assert same_tensors(fp8, of_step)
    shutil.rmtree(run / "model")
    (run / "summary.json").unlink()
    newest = export(find_source(run, None, lines.append), tmp_path / "newest").folder
    assert same_tensors(newest, last)
    card = (first / "README.md").read_text()
    assert "after 1 step," in card and "| start |" in card and "grpo" in card
    assert re.search(r"Of [\d,]+ log-probabilities recorded while sampling, 0 differed", card)
    assert re.search(r"held\\_out accuracy \| \S+.* \| 1 \|", card)
    with pytest.raises(ConfigError, match=r"--step is 7, but .* there: 1, 2"):
        find_source(run, 7, lines.append)
    with pytest.raises(ConfigError, match=r"does not say by which figure \(checkpoint\.keep_best"):
        find_source(run, "best", lines.append)
    manifest = json.loads((run / "run.json").read_text())
    manifest["config"]["checkpoint"]["keep_best"] = "eval/held_out/accuracy"
    (run / "run.json").write_text(json.dumps(manifest))
    figures = {
        step: json.loads((run / f"checkpoints/step_{step:06}/manifest.json").read_text())
        for step in (1, 2)
    }
    best = max((1, 2), key=lambda s: figures[s]["evaluation"]["eval/held_out/accuracy"])
    assert find_source(run, "best", lines.append).step == best
    assert lines[-1] == f"the best checkpoint by eval/held_out/accuracy is that of step {best}"


def test_a_run_in_int8_is_written_in_it_in_bf16_or_quantised_anew(
    make_config: MakeConfig, write_reward: Callable[[str], str], tmp_path: Path, lines: Lines
) -> None:
    reward = write_reward("return float(sum(completion.token_ids) % 3)")
    config = make_config(reward, precision="int8", training={"steps": 1})
    train(config)
    source = find_source(config.output, None, lines.append)
    assert same_tensors(export(source, tmp_path / "bf16").folder, config.output / "model")
    stored = export(source, tmp_path / "int8", "int8")
    assert stored.sampled_in is None and stored.quantised > 0
    policy = load_policy(config.output / "model", "int8", trainable=False)
    found = read_folder(stored.folder)
    for path, linear in policy.weights("rollout").linears.items():
        assert isinstance(linear.matrix, Int8Rows)
        parts = [found[part] for part in policy.decoder.masters()[f"{path}.weight"].parts]
        assert torch.equal(torch.cat(parts), linear.matrix.values)
    card = (stored.folder / "README.md").read_text()
    assert "- int8\n" in card and "behind blocks of a Hadamard matrix" in card
    assert "apply_transform_config(model" in card
    with pytest.raises(ModelError, match=r"compressed-tensors' format.* --format bf16"):
        export(find_source(stored.folder, None, lines.append), tmp_path / "no")
    with pytest.raises(ConfigError, match=r"flow int8 samples with matrices in INT8.*--precision"):
        export(source, tmp_path / "refused", "fp8")
    assert not (tmp_path / "refused").exists()
    anew = export(source, tmp_path / "fp8", "fp8", PrecisionConfig(preset="fp8"))
    assert anew.sampled_in == "int8"
    card = (anew.folder / "README.md").read_text()
    assert "in INT8, in rollout and training" in card and "quantised anew" in card


def test_a_folder_in_int8_has_no_channel_of_a_norm_that_stands_out(
    tmp_path: Path, lines: Lines, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has the integers and norms with which a policy samples that reads the same folder."""
    planted = random_policy(TINY, PrecisionConfig(preset="fp32"), seed=0)
    with torch.no_grad():
        planted.masters["layers.0.input_norm.weight"][[3, 17]] *= 300
        planted.masters["layers.0.qkv_proj.weight"][:, [3, 17]] /= 300
    save_policy(planted, tmp_path / "planted", tokenizer_from=starter_folder())
    policy = load_policy(tmp_path / "planted", "int8", trainable=False)
    source = find_source(tmp_path / "planted", None, lines.append)
    capsys.readouterr()
    found = read_folder(export(source, tmp_path / "int8", "int8").folder)
    assert "2 channels of 1 norms" in capsys.readouterr().err
    plain = policy.weights("rollout").plain
    for name, master in policy.decoder.masters().items():
        if master.kind == "matrix":
            made = policy.weights("rollout").linears[name.removesuffix(".weight")].matrix
            assert isinstance(made, Int8Rows)
            assert torch.equal(torch.cat([found[part] for part in master.parts]), made.values)
        else:
            (part,) = master.parts
            assert torch.equal(found[part], plain[name])
    assert float(found["model.layers.0.input_layernorm.weight"].max()) < 10


@pytest.mark.parametrize("family", ["qwen3_5_text", "gemma3_text", "qwen2", "granite"])
def test_what_is_not_in_int8_is_as_it_was(family: Family, tmp_path: Path, lines: Lines) -> None:
    """Of every shape that a family's tensors have, those of a delta net among them."""
    config = replace(TINY, family=family, num_layers=2, **delta_nets(family, 2))
    save_policy(
        disturbed(random_policy(config, PrecisionConfig(preset="fp32"), seed=0)),
        tmp_path / "folder",
        tokenizer_from=starter_folder(),
    )
    biased = ("qkv_proj",) if family == "qwen2" else ()  # refused in INT8
    source = find_source(tmp_path / "folder", None, lines.append)
    exported = export(
        source, tmp_path / "int8", "int8", PrecisionConfig(preset="int8", modules_bf16=biased)
    )
    before, found = read_folder(tmp_path / "folder"), read_folder(exported.folder)
    others = [name for name in before if found[name].dtype == torch.bfloat16]
    assert exported.quantised == len(before) - len(others) > 0
    assert [name for name in others if not torch.equal(found[name], before[name])] == []


def test_a_checkpoint_of_another_model_and_a_damaged_one(
    make_config: MakeConfig, tiny_folder: Path, tmp_path: Path, lines: Lines
) -> None:
    folder = tmp_path / "start"
    shutil.copytree(tiny_folder, folder)
    config = make_config(model=str(folder), training={"steps": 1}, checkpoint={"every": 1})
    train(config)
    wider = replace(read_any_config(tiny_folder), intermediate_size=256)
    save_policy(random_policy(wider, PrecisionConfig(preset="fp8"), seed=0), folder)
    with pytest.raises(CheckpointError, match=r"gate_up_proj\.weight has the shape .* another"):
        find_source(config.output, 1, lines.append)
    masters = config.output / "checkpoints" / "step_000001" / "masters.safetensors"
    content = bytearray(masters.read_bytes())
    content[-1] ^= 1
    masters.write_bytes(content)
    with pytest.raises(CheckpointError, match="SHA-256"):
        find_source(config.output, 1, lines.append)


def test_what_has_no_model_is_refused(tmp_path: Path, tiny_folder: Path, lines: Lines) -> None:
    with pytest.raises(ConfigError, match="no such run or model folder"):
        find_source(tmp_path / "nowhere", None, lines.append)
    (tmp_path / "mine").mkdir()
    with pytest.raises(ConfigError, match=r"did you mean \S*/mine\?"):
        find_source(tmp_path / "mien", None, lines.append)
    with pytest.raises(ConfigError, match=r"--step is for a run, and .* is none"):
        find_source(tiny_folder, 1, lines.append)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match="neither a finished model nor a checkpoint"):
        find_source(tmp_path, None, lines.append)


def test_nothing_is_overwritten_unasked_and_nothing_in_place(
    tiny_folder: Path, tmp_path: Path, lines: Lines
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    source = find_source(folder, None, lines.append)
    for place in (folder, folder / ".." / "model", tmp_path):
        with pytest.raises(ConfigError, match="never converted in place"):
            export(source, place, overwrite=True)
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(ConfigError, match="is a file"):
        export(source, file, overwrite=True)
    other = tmp_path / "other"
    other.mkdir()
    export(source, other)  # an empty one is as good as none
    (other / "mark").write_text("x")
    with pytest.raises(ConfigError, match=r"already holds files.*--overwrite"):
        export(source, other)
    export(source, other, overwrite=True)
    assert not (other / "mark").exists()
    diary = tmp_path / "diary"
    diary.mkdir()
    (diary / "monday").write_text("x")
    with pytest.raises(ConfigError, match=r"no config\.json: it is no model folder"):
        export(source, diary, overwrite=True)
    assert (diary / "monday").exists()


@pytest.mark.parametrize("broken", ["write", "value"])
def test_a_fault_leaves_the_old_folder_and_nothing_else(
    broken: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: Lines
) -> None:
    source = find_source(tiny_folder, None, lines.append)
    out = export(source, tmp_path / "out").folder
    before = {file.name: file.read_bytes() for file in out.iterdir()}

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    if broken == "write":
        monkeypatch.setattr(storage, "sync", full)
        expected, text = StorageError, "No space left.*then export again"
    else:
        tensors = read_folder(tiny_folder)
        tensors["model.norm.weight"][3] = torch.nan
        copy = tmp_path / "nan"
        shutil.copytree(tiny_folder, copy)
        save_file(tensors, copy / WEIGHTS_FILE)
        source = find_source(copy, None, lines.append)
        expected, text = ModelError, r"model\.norm\.weight holds a NaN"
    with pytest.raises(expected, match=text):
        export(source, out, overwrite=True)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    assert not list(tmp_path.glob(".*"))


def test_a_full_disk_is_found_before_anything_is_written(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: Lines
) -> None:
    monkeypatch.setattr(disk_space, "free_bytes", lambda _: 10_000)
    with pytest.raises(StorageError, match=r"needs [\d,]+ bytes, but 10,000 are free"):
        export(find_source(tiny_folder, None, lines.append), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_the_flow_of_a_folder_can_be_chosen(tmp_path: Path, lines: Lines) -> None:
    two_layers = random_policy(replace(TINY, num_layers=2), PrecisionConfig(preset="fp32"), seed=0)
    save_policy(two_layers, tmp_path / "two", tokenizer_from=starter_folder())
    source = find_source(tmp_path / "two", None, lines.append)
    kept = PrecisionConfig(first_layers_bf16=1)
    result = export(source, tmp_path / "out", "fp8", kept)
    assert result.quantised + len(result.not_whole) == 7
    formats = {name: x.dtype for name, x in read_folder(result.folder).items()}
    assert formats["model.layers.0.mlp.down_proj.weight"] == torch.bfloat16
    assert formats["model.layers.1.mlp.down_proj.weight"] == torch.float8_e4m3fn
    whole = export(source, tmp_path / "whole", "fp8")
    assert whole.quantised > result.quantised
    with pytest.raises(ConfigError, match="samples with no matrix in FP8"):
        export(source, tmp_path / "none", "fp8", PrecisionConfig(preset="bf16"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("scales", ["power_of_two", "fp32"])
def test_fp8_exported_and_imported_has_the_same_bytes_and_is_exact(
    scales: str, tmp_path: Path, lines: Lines
) -> None:
    """Of the starter, all of whose matrices consist of whole blocks."""
    precision = PrecisionConfig.model_validate({"preset": "fp8", "scales": scales})
    policy = load_policy(starter_folder(), precision)
    one = export(find_source("starter", None, lines.append), tmp_path / "one", "fp8", precision)
    other = export(find_source(one.folder, None, lines.append), tmp_path / "other", "fp8")
    assert one.quantised == other.quantised == 28
    for name in (WEIGHTS_FILE, "config.json"):
        assert (other.folder / name).read_bytes() == (one.folder / name).read_bytes()
    again = load_policy(one.folder, precision, trainable=False)
    for path, linear in policy.weights("rollout").linears.items():
        found, wanted = again.weights("rollout").linears[path].matrix, linear.matrix
        assert isinstance(found, QuantTensor) and isinstance(wanted, QuantTensor)
        assert torch.equal(raw(found.values), raw(wanted.values))
        assert torch.equal(found.scales, wanted.scales)
    options = VerifyOptions(prompts=2, samples=1, max_new_tokens=3)
    result = verify(one.folder, precision, options)
    assert result.comparison.tokens_compared > 20
    assert result.comparison.tokens_differing == 0


def test_fp8_becomes_bf16_without_a_loss(tmp_path: Path, lines: Lines) -> None:
    fp8 = export(find_source("starter", None, lines.append), tmp_path / "fp8", "fp8").folder
    bf16 = export(find_source(fp8, None, lines.append), tmp_path / "bf16").folder
    assert "quantization_config" not in json.loads((bf16 / "config.json").read_text())
    again = export(find_source(bf16, None, lines.append), tmp_path / "again", "fp8").folder
    one, other = (FolderCheckpoint.open(folder, read_any_config(folder)) for folder in (fp8, again))
    for name in one.tensors:
        assert torch.equal(one.tensor(name), other.tensor(name))


def test_generation_stops_are_written_where_the_folder_has_none(
    tiny_folder: Path, tmp_path: Path, lines: Lines
) -> None:
    """Other engines must still see every token that ends a completion."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"bos_token_id": 1}))
    out = export(find_source(folder, None, lines.append), tmp_path / "out").folder
    assert json.loads((out / "config.json").read_text())["bos_token_id"] == 1
    stops = json.loads((out / "generation_config.json").read_text())
    assert stops["eos_token_id"] == [load_tokenizer(tiny_folder).eos_token_id]


def test_the_model_that_a_policy_saves_is_what_it_exports(tmp_path: Path, lines: Lines) -> None:
    policy = load_policy(starter_folder(), PrecisionConfig(preset="fp8"))
    save_policy(policy, tmp_path / "saved", starter_folder())
    out = export(find_source("starter", None, lines.append), tmp_path / "out").folder
    assert (out / WEIGHTS_FILE).read_bytes() == (tmp_path / "saved" / WEIGHTS_FILE).read_bytes()
    assert PolicyTensors(policy).in_e4m3 == frozenset()


class FakeHub(BaseHTTPRequestHandler):
    """What the hub answers to a new model and a commit, and what it was sent."""

    files: ClassVar[dict[str, bytes]]
    created: ClassVar[list[dict[str, Any]]]
    refusal: ClassVar[int | None]

    def log_message(self, format: str, *values: Any) -> None:
        """Nothing is printed."""

    def do_GET(self) -> None:
        if self.refusal is not None:
            self.answer({"error": "no"}, self.refusal)
        elif "/tree/" in self.path:
            found = [(name, len(content)) for name, content in self.files.items()]
            self.answer(
                [{"type": "file", "path": name, "size": size, "oid": "1"} for name, size in found]
            )
        else:
            siblings = [{"rfilename": name} for name in self.files]
            self.answer({"id": "me/mine", "siblings": siblings, "private": False, "tags": []})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.refusal is not None:
            self.answer({"error": "no"}, self.refusal)
        elif self.path == "/api/repos/create":
            self.created.append(json.loads(body))
            self.answer({"url": f"http://{self.headers['Host']}/me/mine", "id": "me/mine"})
        elif self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = [
                {"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names
            ]
            self.answer({"files": modes})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    value = line["value"]
                    self.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "deletedFile":
                    self.files.pop(line["value"]["path"])
            url = f"http://{self.headers['Host']}/me/mine/commit/{'1' * 40}"
            self.answer({"commitUrl": url, "commitOid": "1" * 40})
        else:
            self.answer({}, 404)

    def answer(self, content: Any, status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def fake_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeHub]]:
    kind = type("Hub", (FakeHub,), {"files": {}, "created": [], "refusal": None})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    yield kind
    server.shutdown()
    server.server_close()


PUSH = ("export", "starter", "--to", "hf://me/mine")


def test_a_model_is_uploaded_with_its_card(
    fake_hub: type[FakeHub], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*PUSH, "--private"]) == 0
    assert fake_hub.created[0]["name"] == "mine" and fake_hub.created[0]["visibility"] == "private"
    assert "/me/mine: " in capsys.readouterr().out
    export(find_source("starter", None, print), tmp_path / "mine")
    assert fake_hub.files == {
        file.name: file.read_bytes() for file in (tmp_path / "mine").iterdir()
    }
    assert b"base_model" not in fake_hub.files["README.md"]


def test_a_model_that_is_there_is_replaced_only_where_that_is_asked_for(
    fake_hub: type[FakeHub], capsys: pytest.CaptureFixture[str]
) -> None:
    fake_hub.files |= {"model-00001-of-00002.safetensors": b"old", "config.json": b"{}"}
    assert main([*PUSH]) == 2
    assert "already holds 2 files" in capsys.readouterr().err
    assert main([*PUSH, "--overwrite"]) == 0
    assert "model-00001-of-00002.safetensors" not in fake_hub.files
    assert fake_hub.files["config.json"] != b"{}"


@pytest.mark.parametrize("target", ["hf:/me/x", "hf://x", "hf://me/x/y", "hf://../x", "hf:me/x"])
def test_another_form_of_a_hub_name_makes_no_folder(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["export", "starter", "--to", target]) == 2
    assert "is written hf://user/name" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_no_token_no_right_and_no_network_say_what_to_do(
    fake_hub: type[FakeHub], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_hub.refusal = 403
    assert main([*PUSH]) == 2
    assert "the token is not one that may write there" in capsys.readouterr().err
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    assert main([*PUSH]) == 2
    error = capsys.readouterr().err
    assert "check the network" in error and "hf upload" in error
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert main([*PUSH]) == 2
    assert "run `hf auth login`, or set HF_TOKEN" in capsys.readouterr().err
