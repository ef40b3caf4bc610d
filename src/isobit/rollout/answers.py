"""Answers of servers that sample for a run, which are input and checked as such.

    AnswerModel            the shape of an answer; keys that it does not name are left alone, since
                           a later server may say more
    read_answer            its body as such, or AnswerError with the place, what stands there and
                           what was expected

An address may lead to a proxy, to another program or to a server of another version, so nothing of
an answer is used before its shape, its types and its ranges are known.  ``isobit.rollout.servers``
says what becomes of a server whose answers cannot be read.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from isobit.util.errors import shown

MOST_ANSWERED = 256 << 20
"""Bytes of an answer."""
Size = Annotated[int, Field(ge=1)]
Token = Annotated[int, Field(ge=0)]


class UnavailableError(Exception):
    """A server that does not answer, or not now."""


class AnswerError(UnavailableError):
    """An answer that is none of such a server."""


class AnswerModel(BaseModel):
    """Base of all answers."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)


Answer = TypeVar("Answer", bound=AnswerModel)


def read_answer(kind: type[Answer], body: bytes, what: str) -> Answer:
    """The body of an answer to ``what``.  Raises AnswerError."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
    key = ".".join(map(str, detail["loc"]))
    problem = detail["msg"].removeprefix("Value error, ")
    if detail["type"] not in ("missing", "json_invalid"):
        problem += f"; found {shown(repr(detail['input']))}"
    raise AnswerError(f"its answer to {what} cannot be read: {key}{key and ': '}{problem}")


class Described(AnswerModel):
    """``/isobit/engine``: what computes there, and its sizes."""

    protocol: Any = None
    isobit: Any = None
    model: Any = None
    flow: Any = None
    bits: Any = None
    weights: str | None
    """The digest of those that it holds; None where they came from no run."""
    server: str | None = None
    """A name of its own, the same at each of its addresses."""
    pages: Size
    page_tokens: Size
    places: Size
    running: Size

    @property
    def sizes(self) -> Mapping[str, int]:
        names = ("pages", "page_tokens", "places", "running")
        return {name: getattr(self, name) for name in names}


class PublishAnswer(AnswerModel):
    """``/isobit/weights/publish``: the digest of all weights, and the checksum of what was
    published of them; None where that was not.
    """

    sha256: str
    published: int | None = None


class DrawnSample(AnswerModel):
    """Tokens drawn for one sample since the last step."""

    number: int
    token_ids: tuple[Token, ...]
    log_probs: tuple[float, ...]
    truncated_log_probs: tuple[float, ...] = ()
    routings: tuple[int, ...] = ()
    finish_reason: str | None = None

    @model_validator(mode="after")
    def _one_entry_a_token(self) -> Self:
        count = len(self.token_ids)
        if len(self.log_probs) != count:
            raise ValueError(f"{count} tokens came with {len(self.log_probs)} log-probabilities")
        for name in ("truncated_log_probs", "routings"):
            if len(getattr(self, name)) not in (0, count):
                raise ValueError(f"{count} tokens came with {len(getattr(self, name))} {name}")
        return self


class Step(AnswerModel):
    """``/isobit/step``."""

    samples: tuple[DrawnSample, ...]
    kept: tuple[int, ...] = ()
    """Keys of the samples of which it has kept what it drew by these weights."""

    def check_tokens(self, most: int) -> None:
        """Raise AnswerError for a token that is not among the first so many."""
        for sample in self.samples:
            if sample.token_ids and max(sample.token_ids) >= most:
                raise AnswerError(
                    f"it has drawn the token {max(sample.token_ids)}; expected ids from 0 to "
                    f"{most - 1}, as the run's model has them"
                )


# vLLM's own servers.


class Rpc(AnswerModel):
    """``/collective_rpc``: what the method of each worker returned."""

    results: tuple[Any, ...] = Field(min_length=1)


class Paused(AnswerModel):
    """``/is_paused``."""

    is_paused: bool


class ServedModel(AnswerModel):
    id: str


class Models(AnswerModel):
    """``/v1/models``."""

    data: tuple[ServedModel, ...] = Field(min_length=1)


class WorkerDescribed(AnswerModel):
    """``Worker.isobit_describe``."""

    isobit: Any = None
    vllm: Any = None
    world: Any = None
    vocabulary: Any = None
    e4m3: Any = None
    makes_scales: Any = None
    logprobs_mode: Any = None
    context: Size
    pages: Size
    page_tokens: Size
    running: Size
    weights: str | None

    @property
    def sizes(self) -> Mapping[str, int]:
        """One more than run at once would wait for its first token without a sign of life."""
        names = ("context", "pages", "page_tokens", "running")
        return {name: getattr(self, name) for name in names} | {"places": self.running}


class Updated(AnswerModel):
    """``Worker.isobit_update``: a problem, or the digest of what was read and what differs."""

    problem: str | None = None
    digest: str = ""
    differs: str | None = None
    makes_scales: bool = False


class Scales(AnswerModel):
    """``Worker.isobit_scales``: JSON, since they may be infinite."""

    scales: str


class ChosenLogProbs(AnswerModel):
    token_logprobs: tuple[float, ...] | None = None


class Choice(AnswerModel):
    """A piece of a stream of ``/v1/completions``."""

    index: Annotated[int, Field(ge=0)]
    token_ids: tuple[Token, ...] | None = None
    logprobs: ChosenLogProbs | None = None
    finish_reason: str | None = None


class Event(AnswerModel):
    """One event of such a stream."""

    error: Any = None
    choices: tuple[Choice, ...] = ()
