"""300 random mutations each of safetensors, index, quantization_config and tokenizer: a ModelError
or the same model, and nothing else.

What is accepted must be what safetensors' own reader finds in the same bytes.  Weights have no
checksum, so that other numbers of the same shape can come out; mutations here leave them alone.
"""

import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from isobit.config.precision import PrecisionConfig
from isobit.data.tokenizer import check_vocabulary, load_tokenizer, stop_token_ids
from isobit.errors import ModelError
from isobit.models.checkpoint import Checkpoint
from isobit.models.config import ModelConfig
from isobit.models.fp8_checkpoint import read_fp8_format
from isobit.models.policy import random_policy
from isobit.models.saving import save_policy
from isobit.models.shards import INDEX_FILE, WEIGHTS_FILE
from isobit.starter import starter_folder

pytestmark = pytest.mark.timeout(120)
COUNT = 300
CONFIG = ModelConfig("llama", 16, 8, 16, 1, 2, 1, 4, 32, 1e-6, 1e4, tied_embeddings=False)
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**63, 10**30, 1.5, float("nan"), "", "F32", "I8", "\x1b[31m", "\ud800",
    "../x.safetensors", "/etc/passwd", [], [0], [[1]], {}, {"a": 1},
)  # fmt: skip


def mutated_bytes(content: bytes, draw: random.Random) -> bytes:
    """Some bytes changed, taken out, put in, repeated or cut off."""
    made = bytearray(content)
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(made) + 1)
        to = min(len(made), at + draw.randint(1, 8))
        kind = draw.randrange(5)
        if kind == 0 and at < len(made):
            made[at] = draw.randrange(256)
        elif kind == 1:
            del made[at:to]
        elif kind == 2:
            made[at:at] = draw.randbytes(draw.randint(1, 8))
        elif kind == 3:
            made[at:at] = made[at:to] * draw.randint(1, 3)
        elif kind == 4 and draw.random() < 0.1:
            del made[at:]
    return bytes(made)


def mutated_json(value: Any, draw: random.Random) -> Any:
    """One place of a JSON value another value, a key renamed, or an entry gone."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(list(value))
        kind = draw.randrange(6)
        rest = {name: one for name, one in value.items() if name != key}
        if kind == 0:
            return rest
        if kind == 1:
            return rest | {f"{key}{draw.choice(['', '.', ' ', '0', chr(27)])}": value[key]}
        if kind == 2:
            return value | {key: value[draw.choice(list(value))]}
        return value | {key: mutated_json(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.8:
        at = draw.randrange(len(value))
        return [*value[:at], mutated_json(value[at], draw), *value[at + 1 :]]
    if type(value) is int and draw.random() < 0.8:
        return draw.choice([value + 1, value - 1, value * 2, -value, value + 8])
    return draw.choice(VALUES)


def outcome(read: Callable[[], object]) -> bool:
    """Whether it was refused, by a message that says so and can be printed."""
    try:
        read()
    except ModelError as error:
        text = str(error)
        assert text.replace("\n", "").isprintable() and len(text) < 3000
        return True
    return False


def masters_of(folder: Path) -> dict[str, Any]:
    return dict(Checkpoint.open(folder, CONFIG).masters())


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
    content, refused = path.read_bytes(), 0
    shapes = {name: master.shape for name, master in masters_of(folder).items()}
    for _ in range(COUNT):
        path.write_bytes(damaged_file(content, draw))
        if outcome(lambda: masters_of(folder)):
            refused += 1
            continue
        assert {name: master.shape for name, master in masters_of(folder).items()} == shapes
        read = Checkpoint.open(folder, CONFIG).tensors
        with safe_open(path, framework="pt") as theirs:
            assert set(theirs.keys()) == read.keys()
            for name, tensor in read.items():
                expected = theirs.get_tensor(name)
                assert tensor.mapped.dtype == expected.dtype and tensor.shape == expected.shape
                assert torch.equal(tensor.mapped, expected)
    assert 200 < refused < COUNT, "some only swap what has the same shape, or touch spaces"


def test_index(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    policy = random_policy(CONFIG, PrecisionConfig(preset="fp32"), seed=0)
    save_policy(policy, folder, limit=700)
    assert len(list(folder.glob("*.safetensors"))) > 2
    path, draw = folder / INDEX_FILE, random.Random(1)
    content, masters, refused = path.read_bytes(), masters_of(folder), 0
    for number in range(COUNT):
        if number % 2:
            path.write_bytes(mutated_bytes(content, draw))
        else:
            path.write_text(json.dumps(mutated_json(json.loads(content), draw)))
        if outcome(lambda: masters_of(folder)):
            refused += 1
        else:
            found = masters_of(folder)
            assert found.keys() == masters.keys()
            assert all(torch.equal(found[name], master) for name, master in masters.items())
    assert 150 < refused < COUNT, "some touch the metadata or spaces alone"


def test_quantization_config() -> None:
    draw, refused = random.Random(2), 0
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
        refused += outcome(lambda config=config: read_fp8_format(config, "config.json"))
    assert 150 < refused < COUNT


def test_tokenizer(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    files = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
    for file in files:
        shutil.copyfile(starter_folder() / file, folder / file)
    draw, refused = random.Random(3), 0

    def read() -> None:
        tokenizer = load_tokenizer(folder)
        check_vocabulary(tokenizer, 128, folder)
        stops = stop_token_ids(tokenizer, folder)
        assert all(type(token) is int for token in stops)
        assert all(type(token) is int for token in tokenizer("3+8=")["input_ids"])

    for number in range(COUNT):
        file = folder / files[number % 3]
        content = file.read_bytes()
        if number % 2:
            file.write_bytes(mutated_bytes(content, draw))
        else:
            file.write_text(json.dumps(mutated_json(json.loads(content), draw)))
        refused += outcome(read)
        file.write_bytes(content)
    assert 100 < refused < COUNT
