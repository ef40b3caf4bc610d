"""A prompt and its answer as a reward model reads them: one conversation, tokenised as a whole.

    with a chat template      the template's text of the prompt's messages and the answer as the
                              assistant's turn, no generation prompt behind it
    without                   the prompt's text, the answer's text, and the token that ends a
                              sequence, where the tokenizer has one

Training from preferences and scoring read the same tokens: both come from here.  Reward models of
others were trained on their template's text as a whole, white space at its end included.  An
answer is a model's text: what it spells is never a control token (``isobit.data.encoding``).
"""

from transformers import PreTrainedTokenizerBase

from isobit.data.encoding import quoted_answer, token_ids
from isobit.data.prompts import chat_messages, encodable, render_chat
from isobit.data.sources import Row
from isobit.errors import DataError
from isobit.records.text import Prompt


def conversation_ids(
    row: Row, answer: str, tokenizer: PreTrainedTokenizerBase, chat: bool = True
) -> tuple[int, ...]:
    """The tokens of the prompt of ``row`` and an answer to it; text prompts go through the template
    too, unless ``chat`` is false.

    Raises ``DataError`` for messages without a template, for what the template refuses, for text
    that no tokenizer can read, and where there is no token at all.
    """
    messages = chat_messages(row, tokenizer, chat)
    if messages is None:
        # the prompt may be what another template rendered (row_of), with control tokens in it
        text = encodable(f"{row.prompt}{quoted_answer(answer, tokenizer)}", row)
        ids = token_ids(text, tokenizer, add_special_tokens=True)
        end = tokenizer.eos_token_id
        if isinstance(end, int) and ids[-1:] != [end]:
            ids = [*ids, end]
    else:
        turns = [*messages, {"role": "assistant", "content": answer}]
        text = render_chat(turns, row, tokenizer, add_generation_prompt=False)
        ids = token_ids(text, tokenizer)
    if not ids:
        raise DataError(f"{row.place}: prompt and answer together have no token")
    return tuple(ids)


def row_of(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> Row:
    """The prompt of a run for another tokenizer than the policy's: as the dataset has it; where it
    has messages and the tokenizer no template for them, the text that the policy read.
    """
    content = prompt.content
    if content is not None and not isinstance(content, str):
        messages = tuple(dict(message) for message in content)
        content = messages if tokenizer.chat_template else None
    text = prompt.text if content is None else content
    return Row(text, prompt.row, f"prompt {prompt.id}")
