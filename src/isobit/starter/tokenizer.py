"""The starter model's tokenizer: one token a printable ASCII character, in Hugging Face format.

Four special tokens come first, then the characters in ASCII order: 99 tokens, which the model pads to ``VOCAB_SIZE`` so that its
embedding is a whole number of 128-wide blocks.  A sequence starts with ``<bos>``.  There is no chat template.
"""

import string

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 128
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
PAD_ID, BOS_ID, EOS_ID, UNK_ID = range(4)


def build_tokenizer(context_tokens: int) -> PreTrainedTokenizerFast:
    """The tokenizer of a model with a context of ``context_tokens``; ``save_pretrained`` writes its files."""
    characters = sorted(string.digits + string.ascii_letters + string.punctuation + " ")
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *characters))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", BOS_ID)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=context_tokens,
        clean_up_tokenization_spaces=False,
    )
