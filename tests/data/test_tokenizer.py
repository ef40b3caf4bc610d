"""Tokenizers from folders, stop tokens, and text from tokens."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from isobit.data.tokenizer import check_vocabulary, decode, load_tokenizer, stop_token_ids
from isobit.errors import ModelError
from tools.starter.tokenizer import EOS_ID, build_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build_tokenizer(64).save_pretrained(str(tmp_path))
    return tmp_path


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte: any character beyond ASCII is several tokens."""
    vocabulary = {
        character: index
        for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_load_gives_what_was_saved(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert tokenizer("3+8=")["input_ids"] == build_tokenizer(64)("3+8=")["input_ids"]


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is not a folder"):
        load_tokenizer(tmp_path / "none")
    with pytest.raises(ModelError, match=r"holds no tokenizer: none of tokenizer.json"):
        load_tokenizer(tmp_path)


def test_a_damaged_tokenizer_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version"')
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_tokenizer(folder)


def test_a_tokenizer_that_loads_and_reads_no_text_is_named(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"model_max_length": "64"}))
    with pytest.raises(ModelError, match="cannot be loaded: TypeError"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("value", "expected"), [(None, (EOS_ID,)), (7, (EOS_ID, 7)), ([9, EOS_ID, 7], (EOS_ID, 7, 9))]
)
def test_stop_tokens_come_from_both_places(
    folder: Path, value: int | list[int] | None, expected: tuple[int, ...]
) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    assert stop_token_ids(load_tokenizer(folder), folder) == expected


def test_stop_tokens_need_no_generation_config(folder: Path) -> None:
    assert stop_token_ids(load_tokenizer(folder), folder) == (EOS_ID,)


def test_unusable_stop_tokens_are_errors(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    for content, message in (
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"eos_token_id": "x"}', "must be a token id or a list of them, found 'x'"),
        ('{"eos_token_id": [2, 128]}', "eos_token_id 128 is no token .* has 128 rows"),
        ('{"eos_token_id": -1}', "eos_token_id -1 is no token of the model"),
    ):
        (folder / "generation_config.json").write_text(content)
        with pytest.raises(ModelError, match=message):
            stop_token_ids(tokenizer, folder, 128)
    (folder / "generation_config.json").unlink()
    with pytest.raises(ModelError, match="names no end-of-sequence token"):
        stop_token_ids(byte_level_tokenizer(), folder)


def test_a_tokenizer_larger_than_the_embedding_is_refused(folder: Path) -> None:
    tokenizer = byte_level_tokenizer()
    check_vocabulary(tokenizer, 256, folder)
    with pytest.raises(ModelError, match=r"has '.' as token 255, but the embedding has 255 rows"):
        check_vocabulary(tokenizer, 255, folder)
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    with pytest.raises(ModelError, match=r"has '<pad>' as token 256, but the embedding has 256"):
        check_vocabulary(tokenizer, 256, folder)


def test_a_panic_of_the_library_is_an_error_of_the_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its Rust half raises what is no ``Exception``; a user's interrupt is none of it."""

    class PanicException(BaseException):
        pass

    for raised, expected in ((PanicException, ModelError), (KeyboardInterrupt, KeyboardInterrupt)):

        def fail(*_: object, raised: type[BaseException] = raised, **__: object) -> None:
            raise raised("slice")

        monkeypatch.setattr(AutoTokenizer, "from_pretrained", fail)
        with pytest.raises(expected):
            load_tokenizer(folder)


@pytest.mark.parametrize("text", ["3+8=11", "né 日本 🙂", "a  b n't ."])
def test_decode_returns_what_was_encoded(text: str) -> None:
    tokenizer = byte_level_tokenizer()
    assert decode(tokenizer, tokenizer(text)["input_ids"]) == text


def test_decode_marks_a_character_cut_in_two() -> None:
    tokenizer = byte_level_tokenizer()
    token_ids = tokenizer("ok 🙂")["input_ids"]
    for end in range(3, len(token_ids)):
        text = decode(tokenizer, token_ids[:end])
        assert text.startswith("ok ")
        assert set(text[3:]) <= {"\ufffd"}
        text.encode("utf-8")


def test_decode_leaves_special_and_padding_tokens_out() -> None:
    tokenizer = build_tokenizer(64)
    token_ids = tokenizer("1+1=")["input_ids"]
    assert decode(tokenizer, [*token_ids, EOS_ID, 127]) == "1+1="
