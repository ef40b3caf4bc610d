"""``isobit ui``: runs in the browser, for who sits at this machine.

The page is served at 127.0.0.1 alone, below a path that begins with a random token; a request with
another token, another method than GET, or a ``Host`` that is not this machine (which a name that
was rebound by DNS would send) is refused.  The browser is told to load nothing from elsewhere.
Every request names a run by the name that the list of runs gave it, never by a path.

Charts are the report's (``isobit.observe.report``), as HTML that its templates escape.  Completions
are JSON, which ``viewer.js`` shows as text.  Nothing is written.
"""

import hmac
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from statistics import fmean, stdev
from threading import Lock
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from isobit.observe.completion_files import Completions, Query
from isobit.observe.report.chart import number_text
from isobit.observe.report.comparison import (
    MOST_RUNS,
    compare_sections,
    differing_settings,
    ends_of,
    notes_on,
)
from isobit.observe.report.flow_view import view_flow
from isobit.observe.report.headline import notices, reason_of, state_of, tiles_of
from isobit.observe.report.panels import build_sections
from isobit.observe.report.settings import flatten, view_settings
from isobit.observe.report.templates import fill
from isobit.observe.run_list import find_runs
from isobit.observe.run_record import RunRecord, WatchedRun, last_figures, record_of
from isobit.records.rounding import are_level
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
SHORT = 240
"""Characters of a text in the table of completions."""
MOST_TOKENS = 20_000
"""Tokens of a completion that are sent."""
MOST_LOOKS = 20
"""At a file, until a completion that was asked for is found."""
MOST_PAIRS = 200
"""Prompts of a paired comparison that are listed."""


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
        """What is served at a port, below ``/TOKEN/``."""
        answers: dict[str, Callable[[QueryParams], dict[str, Any]]] = {
            "runs": self.runs,
            "run": self.run,
            "compare": self.compare,
            "completions": self.completions,
            "completion": self.completion,
            "pairs": self.pairs,
        }
        routes = [Route("/", self._shell)]
        routes += [Route(f"/{name}", _asset(name)) for name in ("viewer.js", "viewer.css")]
        routes += [Route(f"/api/{name}", self._answering(made)) for name, made in answers.items()]
        failed = dict.fromkeys((HTTPException, IsobitError, OSError, ValueError), _failed)
        return Guard(Starlette(routes=routes, exception_handlers=failed), token, port)

    def _shell(self, request: Request) -> Response:
        return HTMLResponse(fill("viewer.html", part="shell"), headers=HEADERS)

    def _answering(
        self, made: Callable[[QueryParams], dict[str, Any]]
    ) -> Callable[[Request], Response]:
        """A route whose answers are made one after the other."""

        def answer(request: Request) -> Response:
            with self._lock:
                return _json(made(request.query_params))

        return answer

    def runs(self, asked: QueryParams) -> dict[str, Any]:
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

    def run(self, asked: QueryParams) -> dict[str, Any]:
        """The page of a run."""
        name = asked.get("run", "")

        def page(record: RunRecord, shown: RunRecord) -> str:
            changed, unchanged = view_settings(record.setting("config"))
            entries = ("started", "device", "versions", "model", "data")
            return fill(
                "viewer.html",
                part="run",
                stopped=reason_of(record),
                notices=list(notices(record)),
                tiles=tiles_of(record),
                sections=build_sections(shown),
                flow=view_flow(record),
                changed=changed,
                unchanged=unchanged,
                environment=list(flatten({key: record.setting(key) for key in entries})),
            )

        return self._growing(asked, [name], lambda records, shown: page(records[0], shown[0]))

    def compare(self, asked: QueryParams) -> dict[str, Any]:
        """Two to seven runs side by side."""
        names, paired = asked.getlist("run"), asked.get("paired") == "1"
        if not 2 <= len(names) <= MOST_RUNS or len(set(names)) < len(names):
            raise HTTPException(400, f"choose 2 to {MOST_RUNS} different runs to compare")

        def page(records: Sequence[RunRecord], shown: Sequence[RunRecord]) -> str:
            return fill(
                "viewer.html",
                part="comparison",
                names=names,
                states=[state_of(record) for record in records],
                notes=notes_on(records),
                ends=ends_of(records),
                settings=differing_settings(records),
                sections=compare_sections(shown, names, paired),
            )

        return self._growing(asked, names, page)

    def _growing(
        self,
        asked: QueryParams,
        names: Sequence[str],
        page: Callable[[Sequence[RunRecord], Sequence[RunRecord]], str],
    ) -> dict[str, Any]:
        """What ``page`` makes of runs, and of their figures within the steps that were asked for;
        without it where nothing has changed since the version that was asked with.
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
        first, last = _steps(asked)
        shown = [
            replace(
                record,
                figures={
                    step: row for step, row in record.figures.items() if first <= step <= last
                },
            )
            for record in records
        ]
        steps = [step for record in records for step in record.figures]
        ends = {"first": min(steps, default=0), "last": max(steps, default=0)}
        return {**answer, **ends, "html": page(records, shown)}

    def _completions(self, names: Sequence[str], choice: str) -> list[Completions]:
        """Those of each run that were kept (``1``) or the samples (``0``); without a choice those
        that were kept, if all of the runs keep all.
        """
        runs = [self._run(name) for name in names]
        of_kept = choice == "1" or (not choice and all(map(_keeps_all, runs)))
        found: list[Completions] = [run.kept if of_kept else run.samples for run in runs]
        for one in found:
            one.look()
        return found

    def completions(self, asked: QueryParams) -> dict[str, Any]:
        """A page of a run's completions that fit the filters."""
        run = self._run(asked.get("run", ""))
        (found,) = self._completions([asked["run"]], asked.get("kept", ""))
        if found is not run.kept:
            run.kept.look()
        forward, count = asked.get("order") == "oldest", len(found.index)
        at = _number(asked, "at", int)
        first = (0 if forward else count - 1) if at is None else at
        rows, further = found.find(_query(asked), first, 1 if forward else -1)
        return {
            "rows": [_short(place, content) for place, content in rows],
            "next": further,
            "total": count,
            "of_kept": found is run.kept,
            "kept": len(run.kept.index) if run.kept.progress == 1 else None,
            "progress": found.progress,
            "sources": found.index.sources(),
            "running": run.record().is_running,
        }

    def completion(self, asked: QueryParams) -> dict[str, Any]:
        """Everything about one completion, and the others of its group."""
        name, place = asked.get("run", ""), _number(asked, "place", int)
        (found,) = self._completions([name], asked.get("kept", "0"))
        looks = 0
        while place is not None and place >= len(found.index) and found.progress < 1:
            found.look()
            looks += 1
            if looks == MOST_LOOKS:
                raise HTTPException(503, f"{found.progress:.0%} of the file is read: ask again")
        if place is None or not 0 <= place < len(found.index):
            raise HTTPException(404, "there is no such completion any more")
        content = found.read(place)
        missing = list[str]()
        if content.get("token_texts") is None and content.get("token_ids") is not None:
            content["token_texts"] = _decoded(self._runs[name], content["token_ids"], missing)
        content["missing"] = missing + _missing(content)
        for key in ("token_texts", "log_probs", "advantages"):
            if isinstance(content.get(key), list):
                content[key] = content[key][:MOST_TOKENS]
        content.pop("token_ids", None)
        content.pop("routings", None)
        return {**content, "place": place, "group": _group(found, place)}

    def pairs(self, asked: QueryParams) -> dict[str, Any]:
        """The prompts that two runs have both answered at a step, by the mean reward of a group."""
        names = asked.getlist("run")
        if len(names) != 2:
            raise HTTPException(400, "two runs make pairs")
        sides = self._completions(names, asked.get("kept", ""))
        known = [
            {
                (side.index.steps[place], side.index.source(place))
                for place in range(len(side.index))
            }
            for side in sides
        ]
        common = sorted(known[0] & known[1])
        step, source = _number(asked, "step", int), asked.get("source", "")
        wanted = [one for one in common if one == (step, source)] or common[-1:]
        answers = [_answers(side, *wanted[0]) if wanted else {} for side in sides]
        both = [prompt for prompt in answers[0] if prompt in answers[1]]
        both = [one for one in both if not any(math.isnan(side[one][0]) for side in answers)]
        gaps = [_gap(*(side[prompt][0] for side in answers)) for prompt in both]
        return {
            "common": [{"step": step, "source": source} for step, source in common[-1000:]],
            "step": wanted[0][0] if wanted else None,
            "source": wanted[0][1] if wanted else None,
            "of_kept": sides[0] is self._run(names[0]).kept,
            "count": len(gaps),
            "progress": min(side.progress for side in sides),
            "mean": fmean(gaps) if gaps else None,
            "error": stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else None,
            "rows": [
                {
                    "prompt_id": prompt,
                    "rewards": [side[prompt][0] for side in answers],
                    "difference": gap,
                    "places": [side[prompt][1] for side in answers],
                    "prompt": _cut(sides[0].read(answers[0][prompt][1]).get("prompt")),
                    "texts": [
                        _cut(side.read(found[prompt][1]).get("completion"))
                        for side, found in zip(sides, answers, strict=True)
                    ],
                }
                for prompt, gap in zip(both[:MOST_PAIRS], gaps, strict=False)
            ],
        }


def _keeps_all(run: WatchedRun) -> bool:
    """Whether the run's recipe keeps all completions, and there are some."""
    run.kept.look()
    return (
        run.record().setting("config", "tracking", "completions") == "all"
        and len(run.kept.index) > 0
    )


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
    elif isinstance(error, OSError):
        status, text = 404, f"a file of the run cannot be read: {error.strerror or error}"
    return _json({"error": text}, status)


def _json(content: Mapping[str, Any], status: int = 200) -> Response:
    return Response(json_text(content, default=str), status, HEADERS, "application/json")


def _number(asked: QueryParams, name: str, kind: type[int] | type[float]) -> Any:
    """A number of the request; None where it has none.  Raises HTTPException for other text."""
    text = asked.get(name, "").strip()
    if not text:
        return None
    try:
        return kind(text)
    except ValueError:
        raise HTTPException(400, f"{name} is {text[:80]!r}, which is no number") from None


def _steps(asked: QueryParams) -> tuple[float, float]:
    first, last = (_number(asked, name, int) for name in ("from", "to"))
    return -math.inf if first is None else first, math.inf if last is None else last


def _query(asked: QueryParams) -> Query:
    first, last = _steps(asked)
    return Query(
        source=asked.get("source", ""),
        prompt_id=asked.get("prompt", ""),
        text=asked.get("text", ""),
        first_step=first,
        last_step=last,
        lowest=_number(asked, "lowest", float),
        highest=_number(asked, "highest", float),
    )


def _row(name: str, path: Path) -> dict[str, Any]:
    """A run of the list, by the last lines of its figures."""
    record = record_of(path, last_figures(path / "metrics.jsonl"), [])
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


def _cut(text: Any) -> str:
    shown = " ".join(str("" if text is None else text)[: 4 * SHORT].split())
    return shown if len(shown) <= SHORT else f"{shown[:SHORT]}\N{HORIZONTAL ELLIPSIS}"


def _short(place: int, content: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the table of completions."""
    names = ("step", "source", "prompt_id", "reward", "finish_reason", "tokens", "advantage")
    turns = content.get("messages")
    return {
        "place": place,
        **{name: content.get(name) for name in names},
        "prompt": _cut(content.get("prompt")),
        "completion": _cut(content.get("completion")),
        "turns": sum(one.get("role") == "assistant" for one in turns if isinstance(one, dict))
        if isinstance(turns, list)
        else None,
    }


def _missing(content: Mapping[str, Any]) -> list[str]:
    """What the run has not recorded of a completion, in sentences."""
    said, texts, length = list[str](), content.get("token_texts"), content.get("tokens")
    if not isinstance(texts, list) or not isinstance(content.get("log_probs"), list):
        said.append("Its tokens and log-probabilities are not recorded.")
    elif isinstance(length, int) and len(texts) < length:
        said.append(
            f"The first {len(texts):,} of its {length:,} tokens are recorded with their "
            "log-probabilities; tracking.completions keeps all of them."
        )
    wanted = {"advantage": "Its advantage is", "reward_parts": "Parts of its reward are"}
    for name, words in wanted.items():
        if name not in content and content.get("source") == "train":
            said.append(f"{words} not recorded here; tracking.completions records that.")
    return said


def _decoded(root: Path, token_ids: Sequence[int], missing: list[str]) -> list[str]:
    """The texts of tokens by the tokenizer of the run's model; their numbers where it has none."""
    if (root / "model").is_dir():
        from isobit.data.tokenizer import load_tokenizer

        with suppress(IsobitError, OSError, ValueError):
            tokenizer = load_tokenizer(root / "model")
            return [str(tokenizer.decode([one])) for one in token_ids[:MOST_TOKENS]]
    missing.append("The run has no finished model yet, so its tokens are shown as numbers.")
    return [f"[{one}]" for one in token_ids[:MOST_TOKENS]]


MOST_OF_GROUP = 512


def _group(found: Completions, place: int) -> list[dict[str, Any]]:
    """The completions beside it in the file that answer the same prompt in the same step."""
    index = found.index

    def key(one: int) -> tuple[int, str, str]:
        return index.steps[one], index.source(one), index.prompt_id(one)

    first = last = place
    while first > 0 and key(first - 1) == key(place) and place - first < MOST_OF_GROUP:
        first -= 1
    while last + 1 < len(index) and key(last + 1) == key(place) and last - place < MOST_OF_GROUP:
        last += 1
    return [{"place": one, "reward": index.rewards[one]} for one in range(first, last + 1)]


def _gap(first: float, second: float) -> float:
    return 0.0 if are_level((first, second)) else second - first


def _answers(found: Completions, step: int, source: str) -> dict[str, tuple[float, int]]:
    """By prompt the mean reward of its group at a step, and the place of its first answer."""
    index = found.index
    groups: dict[str, list[int]] = {}
    for place in range(len(index)):
        if index.steps[place] == step and index.source(place) == source:
            groups.setdefault(index.prompt_id(place), []).append(place)
    answers: dict[str, tuple[float, int]] = {}
    for prompt, places in groups.items():
        means = [index.means[one] for one in places if not math.isnan(index.means[one])]
        answers[prompt] = fmean(means) if means else math.nan, places[0]
    return answers
