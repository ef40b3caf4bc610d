"""``isobit ui``: runs in the browser, for who sits at this machine.

The page is served at 127.0.0.1 alone, below a path that begins with a random token; a request with
another token, another method than GET, or a ``Host`` that is not this machine (which a name that
was rebound by DNS would send) is refused.  The browser is told to load nothing from elsewhere.
Every request names a run by the name that the list of runs gave it, never by a path.

Charts are the report's (``isobit.observe.report``), as HTML that its templates escape.  Completions
are JSON, which ``viewer.js`` shows as text.  Nothing is written.
"""

import hmac
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from threading import Lock
from typing import Any, cast, get_args

from starlette.applications import Starlette
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from isobit.observe.completion_pages import (
    NotThereError,
    number,
    one_completion,
    page_of_completions,
    pairs_of,
    rewards_of_step,
    step_range,
)
from isobit.observe.figures import last_figures
from isobit.observe.report.comparison import (
    MOST_RUNS,
    Combination,
    compare_sections,
    describe_comparison,
)
from isobit.observe.report.headline import reason_of, state_of, tiles_of
from isobit.observe.report.numbers import number_text
from isobit.observe.report.page import describe_run
from isobit.observe.report.series import Axis, View
from isobit.observe.report.templates import fill
from isobit.observe.run_list import find_runs
from isobit.observe.run_record import RunRecord, WatchedRun, record_of
from isobit.util.errors import IsobitError
from isobit.util.hosts import HostCheck
from isobit.util.strict_json import json_text

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
OPEN_RUNS = MOST_RUNS + 1
"""Runs whose files are remembered; those that nobody has asked for longest are forgotten."""
MOST_LISTED = 500
"""Runs of the list, the latest first."""
MOST_SMOOTHED = 10_000
"""Points that are smoothed over."""

Answer = dict[str, Any]
Answering = Callable[[QueryParams], Answer]


class Guard:
    """Lets in who knows the token, by a name of this machine, to read."""

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self._app, self._token = app, token.encode()
        self._hosts = HostCheck(("127.0.0.1", "localhost"), port)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        _, _, rest = scope["path"].partition("/")
        given, slash, below = rest.partition("/")
        refusal = None
        if self._hosts.wrong_header(scope["headers"]) is not None:
            refusal = 421, "this address is not the one that isobit ui has printed"
        elif not hmac.compare_digest(given.encode("utf-8", "replace"), self._token):
            refusal = 403, "the address lacks its token: copy the whole line of isobit ui"
        elif scope["method"] not in ("GET", "HEAD"):
            refusal = 405, "this page only reads"
        elif not slash:
            refusal = 404, "the address ends with a slash"
        if refusal is not None:
            await Response(refusal[1], refusal[0], HEADERS, "text/plain")(scope, receive, send)
            return
        await self._app({**scope, "path": f"/{below}", "root_path": ""}, receive, send)


class Viewer:
    """The runs in some folders, and what was read of those that were looked at."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = roots
        self._runs: dict[str, Path] = {}
        self._open: OrderedDict[str, WatchedRun] = OrderedDict()
        self._lock = Lock()

    def app(self, token: str, port: int) -> ASGIApp:
        """The application for a port, below ``/TOKEN/``."""
        answers: dict[str, Answering] = {
            "runs": self.runs,
            "run": self.run,
            "compare": self.compare,
            "completions": self._of_one(page_of_completions),
            "completion": self._of_one(one_completion),
            "rewards": self._of_one(rewards_of_step),
            "pairs": self.pairs,
        }
        routes = [Route("/", self._shell)]
        routes += [Route(f"/{name}", _asset(name)) for name in ("viewer.js", "viewer.css")]
        routes += [
            Route(f"/api/{name}", self._answering(answer)) for name, answer in answers.items()
        ]
        failed = dict.fromkeys(
            (HTTPException, IsobitError, NotThereError, OSError, ValueError), _failed
        )
        return Guard(Starlette(routes=routes, exception_handlers=failed), token, port)

    def _shell(self, request: Request) -> Response:
        return HTMLResponse(fill("viewer.html", part="shell"), headers=HEADERS)

    def _answering(self, answer: Answering) -> Callable[[Request], Response]:
        """A route whose answers are made one after the other."""

        def respond(request: Request) -> Response:
            with self._lock:
                return _json(answer(request.query_params))

        return respond

    def runs(self, asked: QueryParams) -> Answer:
        """The list of runs, the one that began last first."""
        self._runs = find_runs(self._roots)
        rows = [_row(name, path) for name, path in self._runs.items()]
        rows.sort(key=lambda row: row["started"], reverse=True)
        return {
            "roots": [str(root) for root in self._roots],
            "total": len(rows),
            "runs": rows[:MOST_LISTED],
        }

    def _run(self, name: str) -> WatchedRun:
        if name not in self._runs:
            self._runs = find_runs(self._roots)
        if name not in self._runs:
            raise HTTPException(404, f"there is no run {name!r} here any more")
        run = self._open.setdefault(name, WatchedRun(self._runs[name]))
        self._open.move_to_end(name)
        while len(self._open) > OPEN_RUNS:
            self._open.popitem(last=False)
        return run

    def run(self, asked: QueryParams) -> Answer:
        def page(records: Sequence[RunRecord], view: View) -> str:
            (record,) = records
            return fill("viewer.html", part="run", **describe_run(record, view))

        return self._growing(asked, [asked.get("run", "")], page)

    def compare(self, asked: QueryParams) -> Answer:
        """Two to seven runs side by side."""
        names, how = asked.getlist("run"), asked.get("how") or "overlay"
        if not 2 <= len(names) <= MOST_RUNS or len(set(names)) < len(names):
            raise HTTPException(400, f"choose 2 to {MOST_RUNS} different runs to compare")
        if how not in get_args(Combination):
            raise HTTPException(400, f"how is one of {', '.join(get_args(Combination))}")

        def page(records: Sequence[RunRecord], view: View) -> str:
            combination = cast("Combination", how)
            return fill(
                "viewer.html",
                part="comparison",
                names=names,
                sections=compare_sections(records, names, combination, view),
                **describe_comparison(records),
            )

        return self._growing(asked, names, page)

    def _growing(
        self,
        asked: QueryParams,
        names: Sequence[str],
        page: Callable[[Sequence[RunRecord], View], str],
    ) -> dict[str, Any]:
        """The page of some runs; without it where nothing has changed since the version that was
        asked with.
        """
        runs = [self._run(name) for name in names]
        records = [run.record() for run in runs]
        states = [state_of(record) for record in records]
        version = f"{[run.figures.version for run in runs]} {states}"
        answer = {
            "version": version,
            "running": any(record.is_running for record in records),
            "done": all(run.figures.is_read for run in runs),
        }
        if asked.get("version") == version:
            return answer
        steps = [record.figures.steps for record in records if len(record.figures)]
        return {
            **answer,
            "first": min((int(column[0]) for column in steps), default=0),
            "last": max((int(column[-1]) for column in steps), default=0),
            "html": page(records, _view(asked)),
        }

    def _of_one(self, answer: Callable[[WatchedRun, QueryParams], Answer]) -> Answering:
        """What answers with a run that is named."""
        return lambda asked: answer(self._run(asked.get("run", "")), asked)

    def pairs(self, asked: QueryParams) -> Answer:
        """Two runs prompt by prompt."""
        names = asked.getlist("run")
        if len(names) != 2:
            raise HTTPException(400, "two runs make pairs")
        return pairs_of([self._run(name) for name in names], asked)


def _view(asked: QueryParams) -> View:
    """How the curves are to be drawn.  Raises ValueError."""
    axis, smoothing = asked.get("axis") or "step", number(asked, "smooth", int) or 1
    if axis not in get_args(Axis):
        raise ValueError(f"axis is one of {', '.join(get_args(Axis))}")
    if not 1 <= smoothing <= MOST_SMOOTHED:
        raise ValueError(f"smooth is a number of points up to {MOST_SMOOTHED:,}")
    return View(cast("Axis", axis), smoothing, *step_range(asked))


def _asset(name: str) -> Callable[[Request], Response]:
    kind = "text/javascript" if name.endswith(".js") else "text/css"

    def answer(request: Request) -> Response:
        text = files("isobit.observe.report").joinpath(name).read_text(encoding="utf-8")
        if name == "viewer.css":
            own = fill("style.html").strip().removeprefix("<style>").removesuffix("</style>")
            text = own + text
        return Response(text, headers=HEADERS, media_type=kind)

    return answer


def _failed(request: Request, error: Exception) -> Response:
    """The answer to what cannot be answered, with a sentence."""
    status, text = 400, str(error)
    if isinstance(error, HTTPException):
        status, text = error.status_code, error.detail
    elif isinstance(error, NotThereError):
        status = 404
    elif isinstance(error, TimeoutError):
        status = 503
    elif isinstance(error, OSError):
        status, text = 404, f"a file of the run cannot be read: {error.strerror or error}"
    return _json({"error": text}, status)


def _json(content: Mapping[str, Any], status: int = 200) -> Response:
    return Response(json_text(content, default=str), status, HEADERS, "application/json")


def _row(name: str, path: Path) -> dict[str, Any]:
    """A run of the list, by the last lines of its figures."""
    record = record_of(path, last_figures(path / "metrics.jsonl"))
    rewards = record.values("reward/mean") or record.values("loss")
    tiles = [tile for tile in tiles_of(record) if tile.label.endswith(("accuracy", "mean reward"))]
    return {
        "name": name,
        "state": state_of(record),
        "stopped": reason_of(record),
        "running": record.is_running,
        "readable": bool(record.manifest),
        "started": str(record.setting("started") or ""),
        "model": str(record.setting("config", "model") or ""),
        "preset": record.flow or "",
        "figure": "reward" if record.values("reward/mean") else "loss",
        "value": number_text(rewards[-1]) if rewards else "",
        "evaluations": [{"label": tile.label, "value": tile.value} for tile in tiles],
    }
