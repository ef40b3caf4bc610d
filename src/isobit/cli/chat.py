"""``isobit chat MODEL``: a conversation in the terminal."""

import io
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from isobit.cli.options import SAMPLING, Command, also_keys, option, set_threads
from isobit.cli.served_run import served_settings
from isobit.cli.start import starting
from isobit.util.errors import ConfigError, DataError, IsobitError
from isobit.util.terminal import say

if TYPE_CHECKING:
    from isobit.config.commands import ServeConfig
    from isobit.data.harmony import AnswerReader
    from isobit.models.folder import SamplingModel
    from isobit.records.messages import Message
    from isobit.rollout.native import NativeEngine
    from isobit.rollout.requests import Request

_COMMAND = Command(
    "chat",
    "Converse with a model in the terminal.",
    [
        *SAMPLING,
        option("--system TEXT", "what the model is told first"),
        option("--max-new-tokens N", "longest answer", key="rollout.max_new_tokens"),
        option("--temperature T", "0 is greedy; by default 1", key="rollout.temperature"),
    ],
    also_keys("precision, rollout and data"),
)


def run_chat(arguments: Sequence[str]) -> int:
    """Converse until the input ends. Raises IsobitError for a model that cannot."""
    options, overrides = _COMMAND.read_some(arguments)
    settings = served_settings(_COMMAND, options, overrides, rollout={"max_sequences": 1})
    set_threads(options)
    with starting():
        from isobit.data.tokenizer import load_tokenizer
        from isobit.kernels.backend import use_back_end
        from isobit.models.folder import load_sampling_model, model_folder
        from isobit.rollout.native import NativeEngine
    if not load_tokenizer(model_folder(options.model)).chat_template:  # before weights are loaded
        raise ConfigError(
            f"{options.model} has no chat template, so it knows no turns; `isobit rollout MODEL "
            "--prompt TEXT` completes a text"
        )
    use_back_end(settings.back_end)
    model = load_sampling_model(options.model, settings.precision, settings.device)
    engine = NativeEngine(model.policy, settings.rollout, model.tokenizer, options.seed)
    say(f"{options.model} in {settings.precision.name}; {_HELP}")
    _converse(model, engine, settings, options.system)
    return 0


_HELP = "Ctrl-C ends an answer, Ctrl-D or /exit the conversation, /help says this again"


def _lines_said() -> "Iterator[str]":
    """The lines of standard input, until it or the user ends the conversation. Bytes that are no
    UTF-8, as half of a character is, cost their line alone.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    while True:
        try:
            text = input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:  # there is no answer that it could end
            print()
            say(_HELP)
            continue
        if any("\udc80" <= letter <= "\udcff" for letter in text):
            say("the line holds bytes that are not UTF-8 and was left out; write it again")
        elif text.strip() in ("/exit", "/quit"):
            return
        elif text.strip() == "/help":
            say(_HELP)
        elif text.strip():
            yield text


def _converse(
    model: "SamplingModel", engine: "NativeEngine", settings: "ServeConfig", system: str | None
) -> None:
    messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    for text in _lines_said():
        messages.append({"role": "user", "content": text})
        try:
            answer = _say_answer(engine, *_turn(messages, model, settings))
        except (DataError, IsobitError) as error:
            say(f"isobit: {error}")
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer})


def _turn(
    messages: "Sequence[Message]", model: "SamplingModel", settings: "ServeConfig"
) -> "tuple[Request, AnswerReader | None, bool]":
    """The next turn, gpt-oss's reader of it, whose special tokens are always drawn as text, and
    whether headers and thinking are hidden.

    Raises DataError for a conversation that does not fit the context or the template.
    """
    from isobit.data.harmony import AnswerReader, writes_harmony
    from isobit.data.prompts import prompts_of_rows
    from isobit.data.sources import Row
    from isobit.records.text import ends_in_thinking
    from isobit.rollout.requests import Request

    row = Row(tuple(messages), {}, "the conversation")
    (prompt,) = prompts_of_rows(
        "turn", [row], model.tokenizer, settings.data, context_tokens=model.context
    )
    sampling = model.sampling(settings.rollout)
    if not writes_harmony(model.tokenizer):
        return Request(prompt, len(messages), 1, sampling), None, False
    hides, sampling = not sampling.special_tokens, replace(sampling, special_tokens=True)
    reader = AnswerReader(ends_in_thinking(prompt.text))
    return Request(prompt, len(messages), 1, sampling), reader, hides


def _say_answer(
    engine: "NativeEngine", request: "Request", reader: "AnswerReader | None", hides: bool
) -> str:
    """Print an answer as it is drawn; Ctrl-C ends it where it stands. Returns it as later turns see
    it: gpt-oss's template refuses its channels.
    """
    from isobit.observe.console import printable

    ((handle,),) = engine.submit([request], "text")
    parts = list[str]()

    def show(text: str, is_last: bool = False) -> None:
        answer = text if reader is None else reader.feed(text, is_last).answer
        parts.append(answer)
        print(printable(answer if hides else text), end="", flush=True)

    try:
        while engine.num_live:
            for event in engine.step():
                show(event.text)
    except KeyboardInterrupt:
        for event in engine.abort([handle]):
            show(event.text)
    show("", is_last=True)
    print()
    return "".join(parts)
