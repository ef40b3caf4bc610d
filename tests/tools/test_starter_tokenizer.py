"""The starter's tokenizer: a character a token, and nothing lost."""

import string
from pathlib import Path

from isobit.data.encoding import decode
from isobit.data.tokenizer import load_tokenizer
from tools.starter.tokenizer import BOS_ID, EOS_ID, PAD_ID, UNK_ID, VOCAB_SIZE, build_tokenizer


def test_every_printable_character_is_one_token_and_comes_back() -> None:
    tokenizer = build_tokenizer(512)
    text = string.digits + string.ascii_letters + string.punctuation + "  n't . "
    token_ids = tokenizer(text)["input_ids"]
    assert token_ids[0] == BOS_ID
    assert len(token_ids) == 1 + len(text)
    assert UNK_ID not in token_ids
    assert decode(tokenizer, token_ids) == text


def test_ids_fit_the_model() -> None:
    tokenizer = build_tokenizer(512)
    assert len(tokenizer) == 99
    assert max(tokenizer.get_vocab().values()) < VOCAB_SIZE
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (
        PAD_ID,
        BOS_ID,
        EOS_ID,
    )


def test_other_characters_are_unknown_one_each() -> None:
    assert build_tokenizer(512)("é\n日")["input_ids"] == [BOS_ID, UNK_ID, UNK_ID, UNK_ID]


def test_it_survives_its_files(tmp_path: Path) -> None:
    build_tokenizer(512).save_pretrained(str(tmp_path))
    loaded = load_tokenizer(tmp_path)
    assert loaded("3+8=")["input_ids"] == build_tokenizer(512)("3+8=")["input_ids"]
    assert loaded.chat_template is None
