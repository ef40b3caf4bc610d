"""The starter model's tokenizer: one token a printable ASCII character, in Hugging Face format.

Four special tokens come first, then the characters in ASCII order: 99 tokens, which the model pads
to ``VOCAB_SIZE`` so that its embedding is a whole number of 128-wide blocks.  A sequence starts
with ``<bos>``.  There is no chat template.
"""

import string

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 128
SPECIAL_TOKENS = PAD, BOS, EOS, UNK = ("<pad>", "<bos>", "<eos>", "<unk>")
PAD_ID, BOS_ID, EOS_ID, UNK_ID = range(len(SPECIAL_TOKENS))


def build_tokenizer(context_tokens: int) -> PreTrainedTokenizerFast:
    """The tokenizer of a model with a context of ``context_tokens``; ``save_pretrained`` writes its
    files.
    """
    characters = sorted(string.digits + string.ascii_letters + string.punctuation + " ")
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *characters))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        model_max_length=context_tokens,
        clean_up_tokenization_spaces=False,
    )
