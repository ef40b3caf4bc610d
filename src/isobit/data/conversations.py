"""A prompt and its answer as a reward model reads them: one conversation, tokenised as a whole.

    with a chat template      the template's text of the prompt's messages and the answer as the
                              assistant's turn, no generation prompt behind it
    without                   the prompt's text, the answer's text, and the token that ends a
                              sequence, where the tokenizer has one

Training from preferences and scoring read the same tokens: both come from here.  Reward models of
others were trained on their template's text as a whole, white space at its end included.  An
answer is a model's text: what it spells is never a control token (``isobit.data.encoding``).
"""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from isobit.data.encoding import quoted_answer, token_ids
from isobit.data.prompts import chat_messages, encodable, is_templated, render_chat
from isobit.data.sources import Row
from isobit.errors import DataError
from isobit.records.text import Prompt


def conversation_ids(
    answers: Sequence[tuple[Row, str]], tokenizer: PreTrainedTokenizerBase, chat: bool = True
) -> list[tuple[int, ...]]:
    """The tokens of the prompt of each row and an answer to it; text prompts go through the
    template too, unless ``chat`` is false.

    Raises ``DataError`` for messages without a template, for what the template refuses, for text
    that no tokenizer can read, and where there is no token at all.
    """
    templated = is_templated(tokenizer, chat)
    texts = [_text(row, answer, tokenizer, chat) for row, answer in answers]
    found = token_ids(texts, tokenizer, add_special_tokens=not templated)
    end = tokenizer.eos_token_id
    if not templated and isinstance(end, int):
        found = [ids if ids[-1:] == [end] else [*ids, end] for ids in found]
    for (row, _), ids in zip(answers, found, strict=True):
        if not ids:
            raise DataError(f"{row.place}: prompt and answer together have no token")
    return [tuple(ids) for ids in found]


def _text(row: Row, answer: str, tokenizer: PreTrainedTokenizerBase, chat: bool) -> str:
    messages = chat_messages(row, tokenizer, chat)
    if messages is None:
        # the prompt may be what another template rendered (row_of), with control tokens in it
        return encodable(f"{row.prompt}{quoted_answer(answer, tokenizer)}", row)
    turns = [*messages, {"role": "assistant", "content": answer}]
    return render_chat(turns, row, tokenizer, add_generation_prompt=False)


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
