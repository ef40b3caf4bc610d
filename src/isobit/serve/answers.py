"""Sending of answers: at once where they are small, and else a piece at a time.

What log-probabilities are written as can take many megabytes.  A large answer is built and written
by a thread of its own, one choice and one piece after the other, while the event loop serves
others; what has been sent is forgotten.  A client reads the same JSON either way.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from isobit.util.strict_json import json_text

SMALL = 4096
"""Log-probabilities of an answer that is written at once, in the event loop."""
_PIECE = 1 << 16
"""Characters."""
_BATCH = 64
"""Entries of a long list that are written by one call, in which nothing else can run."""

_writing = ThreadPoolExecutor(1, "answers")


class LazyList:
    """A list whose entries are made as they are written, once and in their order."""

    def __init__(self, count: int, make: Callable[[int], Any]) -> None:
        self._count, self._make = count, make

    def __iter__(self) -> Iterator[Any]:
        return map(self._make, range(self._count))


def written(content: Any) -> str:
    """The content as JSON in ASCII, which can hold whatever a client echoes."""
    return json_text(content, default=list, ascii=True)


def json_response(content: Any, status: int = 200) -> Response:
    return Response(written(content), status, media_type="application/json")


def pieces(content: Any) -> Iterator[str]:
    """The text of ``written``, bit by bit."""
    if isinstance(content, dict):
        begin = "{"
        for name, value in content.items():
            yield f"{begin}{written(name)}: "
            yield from pieces(value)
            begin = ", "
        yield "}" if content else "{}"
    elif isinstance(content, LazyList):
        begin = "["
        for value in content:
            yield begin
            yield from pieces(value)
            begin = ", "
        yield "]" if begin != "[" else "[]"
    elif isinstance(content, list) and len(content) > _BATCH:
        for first in range(0, len(content), _BATCH):
            text = written(content[first : first + _BATCH])
            yield f"{', ' if first else '['}{text[1:-1]}"
        yield "]"
    else:
        yield written(content)


async def in_pieces(content: Any) -> AsyncIterator[str]:
    """The text of ``written``, made by another thread as it is asked for."""
    texts, loop = pieces(content), asyncio.get_running_loop()
    while piece := await loop.run_in_executor(_writing, _taken, texts):
        yield piece


def _taken(texts: Iterator[str]) -> str:
    taken, size = list[str](), 0
    for text in texts:
        taken.append(text)
        size += len(text)
        if size >= _PIECE:
            break
    return "".join(taken)


class Streamed(Response):
    """An answer whose text comes a piece at a time. ``close`` is called at its end.

    Where the time of a graceful end is over, ``last_words`` are sent behind what was, if there are
    any; without them the body stays cut off.
    """

    def __init__(
        self,
        texts: AsyncIterator[str],
        close: Callable[[], None],
        media_type: str,
        last_words: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.media_type = media_type
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._texts, self._close, self._last_words = texts, close, last_words

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def give(text: str, is_more: bool = True) -> None:
            body = {"type": "http.response.body", "body": text.encode(), "more_body": is_more}
            await send(body)

        is_whole = True
        try:
            await send(
                {
                    "type": "http.response.start",
                    "headers": self.raw_headers,
                    "status": self.status_code,
                }
            )
            async for text in self._texts:
                await give(text)
                is_whole = text.endswith("\n\n")
            await give("", is_more=False)
        except asyncio.CancelledError:
            last = self._last_words()
            if last is None:
                raise
            await give(last if is_whole else f"\n\n{last}", is_more=False)
        finally:
            self._close()
