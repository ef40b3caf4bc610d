"""300 random mutations each of safetensors, index, quantization_config and tokenizer: a ModelError
or the same model, and nothing else.

What is accepted must be what safetensors' own reader finds in the same bytes.  Weights have no
checksum, so that other numbers of the same shape can come out; mutations here leave them alone.
"""

import json
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from isobit.config.precision import PrecisionConfig
from isobit.data.stop_tokens import stop_token_ids
from isobit.data.tokenizer import check_vocabulary, load_tokenizer
from isobit.models.checkpoint import FolderCheckpoint
from isobit.models.config import ModelConfig
from isobit.models.policy import random_policy
from isobit.models.quantised_checkpoint import read_quantisation
from isobit.models.safetensors import INDEX_FILE, WEIGHTS_FILE
from isobit.models.saving import save_policy
from isobit.starter import starter_folder
from isobit.util.errors import ModelError
from tests.mutations import COUNT, Outcomes, mutated_bytes, mutated_json

pytestmark = pytest.mark.timeout(120)
CONFIG = ModelConfig("llama", 16, 8, 16, 1, 2, 1, 4, 32, 1e-6, 1e4, tied_embeddings=False)


def masters_of(folder: Path) -> dict[str, Any]:
    return dict(FolderCheckpoint.open(folder, CONFIG).masters())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    save_policy(random_policy(CONFIG, PrecisionConfig(preset="fp32"), seed=0), folder)
    return folder


def header_of(content: bytes) -> tuple[bytes, bytes]:
    length = struct.unpack("<Q", content[:8])[0]
    return content[8 : 8 + length], content[8 + length :]


def damaged_file(content: bytes, draw: random.Random) -> bytes:
    """The header's length, its text or its entries, or how much data follows."""
    header, data = header_of(content)
    kind = draw.randrange(4)
    if kind == 0:
        return mutated_bytes(content[:8], draw) + content[8:]
    if kind == 1:
        by = draw.randint(1, 64)
        return draw.choice([content[:-by], content + draw.randbytes(by)])
    if kind == 2:
        header = mutated_bytes(header, draw)
    else:
        header = json.dumps(mutated_json(json.loads(header), draw)).encode()
    return struct.pack("<Q", len(header)) + header + data


def test_safetensors(folder: Path) -> None:
    path, draw = folder / WEIGHTS_FILE, random.Random(0)
    content, outcomes = path.read_bytes(), Outcomes("safetensors")
    shapes = {name: master.shape for name, master in masters_of(folder).items()}
    for _ in range(COUNT):
        path.write_bytes(damaged_file(content, draw))
        if outcomes.refuses(lambda: masters_of(folder), ModelError):
            continue
        assert {name: master.shape for name, master in masters_of(folder).items()} == shapes
        read = FolderCheckpoint.open(folder, CONFIG).tensors
        with safe_open(path, framework="pt") as theirs:
            assert set(theirs.keys()) == read.keys()
            for name, tensor in read.items():
                expected = theirs.get_tensor(name)
                assert tensor.mapped.dtype == expected.dtype and tensor.shape == expected.shape
                assert torch.equal(tensor.mapped, expected)
    outcomes.check(2 / 3)  # some only swap what has the same shape, or touch spaces


def test_index(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    policy = random_policy(CONFIG, PrecisionConfig(preset="fp32"), seed=0)
    save_policy(policy, folder, limit=700)
    assert len(list(folder.glob("*.safetensors"))) > 2
    path, draw = folder / INDEX_FILE, random.Random(1)
    content, masters, outcomes = path.read_bytes(), masters_of(folder), Outcomes("the index")
    for number in range(COUNT):
        if number % 2:
            path.write_bytes(mutated_bytes(content, draw))
        else:
            path.write_text(json.dumps(mutated_json(json.loads(content), draw)))
        if not outcomes.refuses(lambda: masters_of(folder), ModelError):
            found = masters_of(folder)
            assert found.keys() == masters.keys()
            assert all(torch.equal(found[name], master) for name, master in masters.items())
    outcomes.check(1 / 2)  # some touch the metadata or spaces alone


def test_quantization_config() -> None:
    draw, outcomes = random.Random(2), Outcomes("quantization_config")
    stored = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.embed_tokens"],
        "scale_fmt": "float",
    }
    for _ in range(COUNT):
        config = {"quantization_config": mutated_json(stored, draw)}
        outcomes.refuses(lambda config=config: read_quantisation(config, "config.json"), ModelError)
    outcomes.check(1 / 2)


def test_tokenizer(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    files = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
    for file in files:
        shutil.copyfile(starter_folder() / file, folder / file)
    draw, outcomes = random.Random(3), Outcomes("the tokenizer's files")

    def read() -> tuple[object, ...]:
        tokenizer = load_tokenizer(folder)
        check_vocabulary(tokenizer, 128, folder)
        stops = stop_token_ids(tokenizer, folder, 128)
        assert all(type(token) is int and 0 <= token < 128 for token in stops)
        ids = tokenizer("3+8=")["input_ids"]
        assert all(type(token) is int and 0 <= token < 128 for token in ids)
        return stops, ids, tokenizer.decode(ids), tokenizer.get_vocab()

    before = read()
    for number in range(COUNT):
        file = folder / files[number % 3]
        content = file.read_bytes()
        if number % 2:
            file.write_bytes(mutated_bytes(content, draw))
        else:
            file.write_text(json.dumps(mutated_json(json.loads(content), draw)))
        if not outcomes.refuses(read, ModelError) and read() != before:
            outcomes.differs()
        file.write_bytes(content)
    outcomes.check(1 / 3)
