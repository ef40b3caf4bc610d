"""Requests of clients: OpenAI's completions and chat completions, with vLLM's names for what OpenAI
does not have.

Unknown keys are refused, and so is a value that would change the answer and that nothing here
obeys, such as a penalty: an answer without it would look like one with it.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from isobit.config.base import MAX_FACTOR, MAX_SEED
from isobit.config.model_shape import MAX_POSITIONS, MAX_VOCAB_SIZE
from isobit.records.text import SamplingParams
from isobit.rollout.scoring import MOST_ALTERNATIVES
from isobit.serve.errors import ApiError
from isobit.util.errors import did_you_mean, shown

MOST_CHOICES = 128
"""Samples of a prompt."""
MOST_PROMPTS = 1024
MOST_STOPS = 16
MOST_STOP_TOKENS = 1024
LONGEST_STOP = 256
"""Characters of a stop string, of which each drawn token costs a search."""
_NEUTRAL: Mapping[str, Sequence[Any]] = {
    "best_of": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "suffix": ("",),
    "min_tokens": (0,),
    "use_beam_search": (False,),
    "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("none",),
    "bad_words": ([],),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "priority": (0,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (-1,),
}
"""Keys of other servers with the values that ask for nothing."""
_IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "request_id",
    }
)
"""Keys that say nothing of the answer."""


def _prompts(value: Any) -> list[str] | list[list[int]]:
    """OpenAI's four forms, as a list of texts or of lists of token ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(prompt, str) for prompt in value):
            return _few(value)
        if _are_tokens(value):
            return [value]
        if all(isinstance(prompt, list) and prompt and _are_tokens(prompt) for prompt in value):
            return _few(value)
    raise ValueError(
        "expected a text, a list of texts, a list of token ids or a list of such lists"
    )


def _few(prompts: list[Any]) -> list[Any]:
    if len(prompts) > MOST_PROMPTS:
        raise ValueError(f"there are {len(prompts)} prompts; expected at most {MOST_PROMPTS}")
    return prompts


def _are_tokens(value: list[Any]) -> bool:
    return all(type(token) is int and 0 <= token <= MAX_VOCAB_SIZE for token in value)


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if (
        not isinstance(stops, list)
        or len(stops) > MOST_STOPS
        or not all(isinstance(stop, str) and 0 < len(stop) <= LONGEST_STOP for stop in stops)
    ):
        raise ValueError(
            f"expected a text or a list of at most {MOST_STOPS} texts, each of 1 to {LONGEST_STOP} "
            "characters"
        )
    return tuple(stops)


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False
    include_obfuscation: bool = False
    """Accepted; nothing is padded."""
    continuous_usage_stats: Literal[False] = False


class GenerationRequest(BaseModel):
    """A request for completions or for a chat completion."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )

    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {}
    """Keys of one kind of request with the values that ask for nothing, as in ``_NEUTRAL``."""
    model: str
    max_tokens: int | None = Field(default=None, ge=0, le=MAX_POSITIONS)
    temperature: float | None = Field(default=None, ge=0, le=MAX_FACTOR)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=MAX_VOCAB_SIZE)
    min_p: float | None = Field(default=None, ge=0, lt=1)
    n: int = Field(default=1, ge=1, le=MOST_CHOICES)
    seed: int | None = Field(default=None, ge=-MAX_SEED - 1, le=MAX_SEED)
    stop: Annotated[tuple[str, ...], BeforeValidator(_stops)] = ()
    stop_token_ids: list[Annotated[int, Field(ge=0, lt=MAX_VOCAB_SIZE)]] = Field(
        default=[], max_length=MOST_STOP_TOKENS
    )
    ignore_eos: bool = False
    skip_special_tokens: bool | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MOST_ALTERNATIVES)

    @property
    def most_tokens(self) -> int | None:
        """The most tokens of an answer; None where the request does not say."""
        return self.max_tokens

    @model_validator(mode="before")
    @classmethod
    def _known(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            raise PydanticCustomError("object", "expected a JSON object")
        kept = dict[str, Any]()
        for name, value in values.items():
            if value is None or (name in _IGNORED and name not in cls.model_fields):
                continue
            if name in cls.model_fields:
                kept[name] = value
            elif name not in _NEUTRAL and name not in cls.neutral:
                near = did_you_mean(name, cls.model_fields)
                raise _wrong(name, f"this server knows no such key{near}")
            elif value not in (neutral := _NEUTRAL.get(name) or cls.neutral[name]):
                allowed = " or ".join(json.dumps(one) for one in neutral)
                raise _wrong(name, f"this server does not support it; leave it out, or {allowed}")
        return kept

    @property
    def alternatives(self) -> int | None:
        """The number of likeliest tokens to return with each drawn one; None for no
        log-probabilities at all.
        """
        raise NotImplementedError

    @property
    def scores_prompt(self) -> int | None:
        """The same number for the tokens of the prompt."""
        return self.prompt_logprobs

    @property
    def reports_usage(self) -> bool:
        """Whether a stream ends in a chunk with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(
        self,
        defaults: SamplingParams,
        max_new_tokens: int,
        special_tokens: bool | frozenset[int],
    ) -> SamplingParams:
        """The sampling parameters; ``defaults`` are the server's."""
        stops = () if self.ignore_eos else defaults.stop_token_ids
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=_given(self.temperature, defaults.temperature),
            top_k=max(_given(self.top_k, defaults.top_k), 0),
            top_p=_given(self.top_p, defaults.top_p),
            min_p=_given(self.min_p, defaults.min_p),
            stop_token_ids=tuple(sorted({*stops, *self.stop_token_ids})),
            stop_strings=(*defaults.stop_strings, *self.stop),
            special_tokens=special_tokens,
        )


def _wrong(name: str, message: str) -> PydanticCustomError:
    return PydanticCustomError("key", "{message}", {"message": message, "name": name})


_Value = TypeVar("_Value", int, float)


def _given(value: _Value | None, default: _Value) -> _Value:
    return default if value is None else value


class CompletionRequest(GenerationRequest):
    """``POST /v1/completions``."""

    prompt: Annotated[list[str] | list[list[int]], BeforeValidator(_prompts)]
    logprobs: int | None = Field(default=None, ge=0, le=MOST_ALTERNATIVES)
    echo: bool = False
    add_special_tokens: bool = True

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def scores_prompt(self) -> int | None:
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((number for number in wanted if number is not None), default=None)


class ChatRequest(GenerationRequest):
    """``POST /v1/chat/completions``."""

    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {
        "echo": (False,),
        "add_special_tokens": (False,),
    }
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=0, le=MAX_POSITIONS)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_ALTERNATIVES)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    chat_template_kwargs: dict[str, Any] = {}
    separate_reasoning: bool = False
    """SGLang's key: thinking between tags is not part of the content. gpt-oss's never is."""
    continue_final_message: bool = False
    add_generation_prompt: bool = True

    @model_validator(mode="after")
    def _fits(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise _wrong("top_logprobs", "it needs logprobs = true")
        if self.tool_choice not in (None, "auto", "none"):
            why = "this server knows 'auto' and 'none': it does not make a model call a tool"
            raise _wrong("tool_choice", why)
        if self.add_generation_prompt is self.continue_final_message:
            names = "add_generation_prompt and continue_final_message"
            raise _wrong("continue_final_message", f"of {names} one must be true and one false")
        return self

    @property
    def most_tokens(self) -> int | None:
        """OpenAI calls ``max_tokens`` deprecated beside the other."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def shown_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the chat template is given."""
        return None if self.tool_choice == "none" else self.tools or None


Kind = TypeVar("Kind", bound=BaseModel)


def read_request(kind: type[Kind], body: bytes | bytearray) -> Kind:
    """Raises ApiError, with the key and a sentence."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        context = detail.get("ctx", {})
        name = context.get("name") or ".".join(map(str, detail["loc"])) or None
        name = None if name is None else shown(name)
        message = detail["msg"].removeprefix("Value error, ")
        if detail["type"] in ("json_invalid", "object"):
            raise ApiError(400, f"the body is not a JSON object: {message}") from None
        if detail["type"] != "missing" and "message" not in context:
            message = f"{message}; found {shown(repr(detail['input']))}"
        raise ApiError(400, f"{name}: {message}", param=name) from None
