"""The viewer of runs: what it lets in, what it answers of a real run, and how it looks."""

import http.client
import json
import re
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import uvicorn

from isobit.algorithms.advantages import group_advantages
from isobit.config.recipes import RunConfig
from isobit.observe.completion_files import TableCompletions
from isobit.observe.console import silent
from isobit.observe.report.numbers import number_text
from isobit.observe.training_log import write_completions
from isobit.observe.viewer import HEADERS, Viewer
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Episode
from isobit.run.loop import train
from tests.sequences import group_of
from tests.tiny import json_lines
from tools.browser import Page, browser, find_chromium

TOKEN = "t0ken"
EVIL = '<img src=x onerror="document.title=1"> \u202eabc'


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """A folder with a real run of two steps, all completions kept, a copy with other rewards and a
    damaged file, and one that is empty.
    """
    folder = tmp_path_factory.mktemp("runs")
    reward = folder / "reward.py"
    reward.write_text(
        "def length(prompt, completion):\n    return float(len(completion.text))\n"
        "def first(prompt, completion):\n    return float(completion.text[:1].isdigit())\n"
    )
    held_out = {"type": "jsonl", "path": "starter:held_out.jsonl", "limit": 3}
    config = {
        "model": str(tiny_folder),
        "output": folder / "real",
        "data": {
            "train": {"type": "jsonl", "path": "starter:train.jsonl", "limit": 16},
            "eval": {"held_out": held_out},
        },
        "reward": {
            "parts": {name: {"function": f"{reward}:{name}"} for name in ("length", "first")},
            "in_process": True,
        },
        "rollout": {"max_new_tokens": 5},
        "training": {"steps": 2, "prompts_per_step": 2, "samples_per_prompt": 3},
        "tracking": {"completions": "all"},
    }
    train(RunConfig.model_validate(config), silent())
    shutil.copytree(folder / "real", folder / "other", ignore=shutil.ignore_patterns("model"))
    figures = json_lines(folder / "other" / "metrics.jsonl")
    for line in figures:
        if "reward/mean" in line:
            line["reward/mean"] *= 2.0
    write(folder / "other" / "metrics.jsonl", figures)
    samples = json_lines(folder / "other" / "completions.jsonl")
    samples[-1] |= {
        "completion": EVIL,
        "messages": [
            {"role": "assistant", "content": f'{EVIL}<tool_call>{{"name": "add"}}</tool_call>'},
            {"role": "tool", "content": "the total is 7"},
            {"role": "assistant", "content": "so [add(3, 4)]"},
            {"role": "tool", "content": "7"},
            {"role": "assistant", "content": '{"name": "add", "parameters": {"a": 3}}'},
            {"role": "tool", "content": "error"},
            {"role": "assistant", "content": "[add(3, 4)] is 7"},
        ],
        "turn_rewards": [-0.25],
        "group_rewards": [one + 2.0 for one in samples[-1]["group_rewards"]],
    }
    write(folder / "other" / "completions.jsonl", samples)
    (folder / "other" / "run.json").write_text("{torn")
    (folder / "empty").mkdir()
    return folder


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


@dataclass
class Served:
    port: int

    def ask(self, path: str, method: str = "GET", host: str | None = None) -> tuple[int, Any, Any]:
        """Status, headers and body; no other headers are sent than ``Host``."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        if host != "":
            connection.putheader("Host", host or f"127.0.0.1:{self.port}")
        connection.endheaders()
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer.status, answer.headers, body

    def api(self, name: str, **values: Any) -> Any:
        status, _, body = self.ask(f"/{TOKEN}/api/{name}?{urlencode(values, doseq=True)}")
        assert status == 200, body
        return json.loads(body)


@contextmanager
def serving(folder: Path) -> Iterator[Served]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        config = uvicorn.Config(
            Viewer([folder]).app(TOKEN, port), log_config=None, lifespan="off", ws="none"
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield Served(port)
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()


@pytest.fixture(scope="module")
def served(runs: Path) -> Iterator[Served]:
    with serving(runs) as found:
        yield found


@pytest.mark.parametrize(
    ("path", "method", "host", "status"),
    [
        (f"/{TOKEN}/", "GET", None, 200),
        (f"/{TOKEN}/api/runs", "GET", "localhost", 200),
        (f"/{TOKEN}/viewer.css", "HEAD", None, 200),
        ("/", "GET", None, 403),
        ("/api/runs", "GET", None, 403),
        (f"/{TOKEN}x/api/runs", "GET", None, 403),
        (f"/{TOKEN[:-1]}/api/runs", "GET", None, 403),
        ("/t%C3%B8ken/api/runs", "GET", None, 403),
        (f"/{TOKEN}/api/runs", "GET", "evil.example", 421),
        (f"/{TOKEN}/api/runs", "GET", "127.0.0.1.evil.example", 421),
        (f"/{TOKEN}/api/runs", "POST", None, 405),
        (f"/{TOKEN}/api/runs", "OPTIONS", None, 405),
        (f"/{TOKEN}/../../etc/passwd", "GET", None, 404),
        (f"/{TOKEN}/%2e%2e/%2e%2e/etc/passwd", "GET", None, 404),
        (f"/{TOKEN}/viewer.html", "GET", None, 404),
        (f"/{TOKEN}/api/run?run=../runs/real", "GET", None, 404),
        (f"/{TOKEN}/api/run?run=/etc", "GET", None, 404),
        (f"/{TOKEN}/api/completion?run=real&place=-1", "GET", None, 404),
        (f"/{TOKEN}/api/completions?run=real&lowest=x", "GET", None, 400),
        (f"/{TOKEN}/api/completions?run=real&order=x", "GET", None, 400),
        (f"/{TOKEN}/api/compare?run=real&run=real", "GET", None, 400),
        (f"/{TOKEN}/api/compare?run=real&run=other&how=x", "GET", None, 400),
        (f"/{TOKEN}/api/run?run=real&axis=x", "GET", None, 400),
        (f"/{TOKEN}/api/run?run=real&smooth=-1", "GET", None, 400),
    ],
)
def test_who_knows_the_token_reads_by_a_name_of_this_machine(
    served: Served, path: str, method: str, host: str | None, status: int
) -> None:
    found, headers, body = served.ask(path, method, host and f"{host}:{served.port}")
    assert found == status, body
    assert {name: headers[name] for name in HEADERS} == HEADERS
    if status != 200:
        assert b"runs/real/" not in body and b"root:" not in body


def test_a_host_that_is_missing_or_of_another_port_is_refused(served: Served) -> None:
    path = f"/{TOKEN}/api/runs"
    assert served.ask(path, host=f"127.0.0.1:{served.port + 1}")[0] == 421
    assert served.ask(path, host="127.0.0.1")[0] == 421
    assert served.ask(path, host="")[0] in (400, 421)  # HTTP/1.1 asks for it


def test_runs_are_listed_and_a_damaged_one_with_what_it_has(served: Served) -> None:
    found = {run["name"]: run for run in served.api("runs")["runs"]}
    assert list(found) == ["real", "other"]
    assert found["real"]["state"] == "finished, 2 of 2 steps" and found["real"]["preset"] == "int8"
    assert [one["label"] for one in found["real"]["evaluations"]] == ["held_out mean reward"]
    assert not found["other"]["readable"] and found["other"]["value"]
    assert "run.json is damaged" in served.api("run", run="other")["html"]


def test_curves_come_again_when_a_step_was_written_and_not_before(
    runs: Path, tmp_path: Path
) -> None:
    shutil.copytree(runs / "real", tmp_path / "growing")
    with serving(tmp_path) as served:
        first = served.api("run", run="growing")
        assert first["last"] == 2 and "Zero-variance groups" in first["html"]
        assert "html" not in served.api("run", run="growing", version=first["version"])
        path = tmp_path / "growing" / "metrics.jsonl"
        line = json.dumps({"step": 3, "reward/mean": 0.5, "made/up": 12345.0})
        with path.open("a") as file:
            file.write(line[:30])
        assert "html" not in served.api("run", run="growing", version=first["version"])
        with path.open("a") as file:
            file.write(line[30:] + "\n")
        second = served.api("run", run="growing", version=first["version"])
        assert second["last"] == 3 and "12,345" in second["html"]
        assert "12,345" not in served.api("run", run="growing", to=2)["html"]
        shutil.rmtree(tmp_path / "growing")
        assert served.ask(f"/{TOKEN}/api/run?run=growing")[0] in (200, 404)
        assert served.api("runs")["runs"] == []
        assert served.ask(f"/{TOKEN}/api/run?run=growing")[0] == 404


def test_every_kept_completion_has_its_tokens_parts_and_advantage(
    served: Served, runs: Path
) -> None:
    logged = json_lines(runs / "real" / "completions.jsonl")
    listed = served.api("completions", run="real", kept=0, order="oldest")
    assert [row["completion"] for row in listed["rows"]] == [one["completion"] for one in logged]
    kept = served.api("completions", run="real", kept=1, source="train", order="oldest")
    assert len(kept["rows"]) == 2 * 2 * 3 and kept["total"] == kept["kept"] == 12 + 3 * 2
    texts = {(one["step"], one["prompt_id"], one["completion"]): one for one in logged}
    same = 0
    for row in kept["rows"]:
        one = served.api("completion", run="real", kept=1, place=row["place"])
        assert one["reward"] == sum(one["reward_parts"].values()) and one["missing"] == []
        assert len(one["token_texts"]) == len(one["log_probs"]) == one["tokens"]
        rewards = [other["reward"] for other in one["group"]]
        given = group_advantages(rewards, normalise_by_std=True)
        place = [other["place"] for other in one["group"]].index(row["place"])
        assert one["advantage"] == pytest.approx(given[place], rel=1e-6)
        twin = texts.get((one["step"], one["prompt_id"], one["completion"]))
        if twin is not None:
            assert one["token_texts"] == twin["token_texts"]
            assert one["log_probs"] == pytest.approx(twin["log_probs"], rel=1e-6)
            same += 1
    assert same >= 4
    sampled = served.api("completion", run="real", place=listed["rows"][3]["place"])
    assert any("advantage is not recorded here" in one for one in sampled["missing"])


def test_what_a_run_keeps_whole_is_shown_first(runs: Path, tmp_path: Path) -> None:
    for name, keeps in (("all", "all"), ("some", 2), ("none", "all")):
        shutil.copytree(runs / "real", tmp_path / name, ignore=shutil.ignore_patterns("model"))
        record = json.loads((tmp_path / name / "run.json").read_text())
        record["config"]["tracking"]["completions"] = keeps
        (tmp_path / name / "run.json").write_text(json.dumps(record))
    shutil.rmtree(tmp_path / "none" / "completions")
    with serving(tmp_path) as served:
        shown = {one: served.api("completions", run=one) for one in ("all", "some", "none")}
        assert [one["of_kept"] for one in shown.values()] == [True, False, False]
        assert shown["all"]["total"] == shown["all"]["kept"] == 18
        assert shown["some"]["kept"] == 18 != shown["some"]["total"]
        assert not served.api("completions", run="all", kept=0)["of_kept"]
        assert served.api("completions", run="some", kept=1)["of_kept"]
        place = shown["some"]["rows"][0]["place"]
        plain = served.api("completion", run="all", place=place)
        assert plain == served.api("completion", run="all", kept=0, place=place)
        assert served.api("pairs", run=["all", "all"])["of_kept"]
        assert not served.api("pairs", run=["all", "some"])["of_kept"]


def test_the_kept_are_counted_when_all_of_their_files_are_read(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TableCompletions, "progress", property(lambda self: 0.5))
    assert served.api("completions", run="real", kept=0)["kept"] is None
    assert served.api("completions", run="real", kept=1)["progress"] == 0.5


def test_tokens_of_turns_have_their_own_advantages_and_turns_their_rewards(
    runs: Path, tmp_path: Path
) -> None:
    """What credit by turn gives reaches the page by token, as PPO's does."""
    shutil.copytree(runs / "real", tmp_path / "acting")
    sequence = TokenSequence.of_answer([5], [1, 2, 9, 3], given=[(3, 4)]).with_columns(
        advantages=(0.5, 0.5, -1.0), turn_rewards=(0.0, 0.25, 0.0)
    )
    said = Episode(("add(3)", "7"), ((("ok", "total 3"),),), reward=1.0)
    group = group_of([Completion(sequence, "7", "stop", said)], [1.0])
    group = replace(group, advantages=[0.0])
    path = tmp_path / "acting" / "completions" / "step_000003.parquet"
    write_completions(path, 3, {"train": [group]}, "all")
    with serving(tmp_path) as served:
        listed = served.api("completions", run="acting", kept=1, source="train", order="newest")
        place = listed["rows"][0]["place"]
        one = served.api("completion", run="acting", kept=1, place=place)
    assert one["step"] == 3 and len(one["token_texts"]) == 3
    assert one["advantages"] == [0.5, 0.5, -1.0]
    assert one["turn_rewards"] == [0.25, 0.0]
    turns = [message for message in one["messages"] if message["role"] == "assistant"]
    assert len(turns) == len(one["turn_rewards"])


def test_kept_completions_show_their_turns_as_messages(runs: Path, tmp_path: Path) -> None:
    """In the order in which they were said, whoever answered; they are counted and searched."""
    shutil.copytree(runs / "real", tmp_path / "acting")
    answers = ((("ok", "total 3"), ("malformed", EVIL)), (("user", "And\nthen? \ud800"),))
    said = Episode(("[add(3)] [x(", "3", "Bye"), answers, reward=1.0)
    sequence = TokenSequence.of_answer([5], [1, 2, 9, 3], given=[(3, 4)])
    made = [Completion(sequence, "Bye", "stop", one) for one in (said, None, Episode(("7",), ()))]
    path = tmp_path / "acting" / "completions" / "step_000003.parquet"
    write_completions(path, 3, {"train": [group_of(made, [1.0, 0.0, 0.0])]}, "all")

    def find(**values: Any) -> list[dict[str, Any]]:
        how = {"run": "acting", "kept": 1, "source": "train", "order": "newest"} | values
        rows = served.api("completions", **how)["rows"]
        return [row for row in rows if row["step"] == 3]

    with serving(tmp_path) as served:
        rows = sorted(find(), key=lambda row: row["place"])
        shown = [served.api("completion", run="acting", kept=1, place=r["place"]) for r in rows]
        found = [[r["place"] for r in find(text=text)] for text in ("TOTAL 3", "u202e", "[x(")]
    assert [row["turns"] for row in rows] == [3, None, 1]
    assert [one["messages"] for one in shown] == [
        [
            {"role": "assistant", "content": "[add(3)] [x("},
            {"role": "tool", "content": "total 3"},
            {"role": "tool", "content": EVIL},
            {"role": "assistant", "content": "3"},
            {"role": "user", "content": "And\nthen? \ud800"},
            {"role": "assistant", "content": "Bye"},
        ],
        None,
        [{"role": "assistant", "content": "7"}],
    ]
    assert found == [[rows[0]["place"]], [], [rows[0]["place"]]]


def test_runs_are_paired_step_by_step_and_prompt_by_prompt(served: Served, runs: Path) -> None:
    overlay = served.api("compare", run=["real", "other"])["html"]
    paired = served.api("compare", run=["real", "other"], how="paired")["html"]
    assert "minus real" in paired and "minus real" not in overlay
    chart = paired.partition("<h3>Reward</h3>")[2].partition("</figure>")[0]
    cells = re.findall(r"<td>([^<]*)</td>", chart)
    steps = [line for line in json_lines(runs / "real" / "metrics.jsonl") if "reward/mean" in line]
    rewards = [number_text(line["reward/mean"]) for line in steps]  # twice as much in the other
    assert cells == ["1", rewards[0], "2", rewards[1]]
    found = served.api("pairs", run=["real", "other"], step=2, source="held_out")
    gaps = [row["difference"] for row in found["rows"]]
    assert found["count"] == len(gaps) == 3 and sorted(gaps) == [0.0, 0.0, 2.0]
    assert found["mean"] == pytest.approx(sum(gaps) / len(gaps))


def test_completions_are_sorted_and_each_knows_its_neighbours(served: Served) -> None:
    how: dict[str, Any] = {"run": "real", "kept": 1, "source": "train"}
    for order, key, sign in (
        ("best", "reward", -1),
        ("worst", "reward", 1),
        ("longest", "tokens", -1),
        ("shortest", "tokens", 1),
    ):
        rows = served.api("completions", **how, order=order)["rows"]
        values = [sign * row[key] for row in rows]
        assert len(rows) == 12 and values == sorted(values)
        places = [row["place"] for row in rows]
        for at, place in enumerate(places):
            shown = served.api("completion", **how, order=order, place=place)
            assert shown["previous"] == (places[at - 1] if at else None)
            assert shown["next"] == (places[at + 1] if at < 11 else None)
    two = served.api("completions", **how, order="best", most=2)
    rest = served.api("completions", **how, order="best", after=two["next"])
    assert len(two["rows"]) == 2 and len(rest["rows"]) == 10 and rest["next"] is None
    assert served.api("completions", **how, most=0)["rows"] == []


def test_a_histogram_counts_every_reward_of_a_step(served: Served) -> None:
    kept = served.api("completions", run="real", kept=1, source="train", to=1)["rows"]
    found = served.api("rewards", run="real", source="train", step=1)
    assert (found["previous"], found["next"], found["of_kept"]) == (None, 2, True)
    cells = re.findall(r"<td>([^<]*)</td>", found["html"])
    assert sum(map(int, cells[1::2])) == len(kept) == 6
    last = served.api("rewards", run="real")
    assert (last["source"], last["step"], last["previous"], last["next"]) == ("train", 2, 1, None)
    sampled = served.api("rewards", run="real", kept=0, step=1)
    assert not sampled["of_kept"] and "of 6 rewards" in sampled["html"]
    nothing = served.api("rewards", run="real", step=7)
    assert (nothing["html"], nothing["previous"], nothing["next"]) == ("", 2, None)


def test_a_run_without_completions_has_no_histogram(runs: Path, tmp_path: Path) -> None:
    """One that was ended before its first, one of fine-tuning, and one that keeps no more."""
    for name, ignored in (("started", "completions*"), ("sampled", "completions")):
        shutil.copytree(runs / "real", tmp_path / name, ignore=shutil.ignore_patterns(ignored))
    with serving(tmp_path) as served:
        answers = [
            served.api("rewards", run="started", **asked)
            for asked in ({}, {"kept": 0}, {"kept": 1}, {"source": "held_out"}, {"step": 1})
        ]
        answers += [served.api("rewards", run="sampled", kept=1)]
        answers += [served.api("rewards", run="sampled", source="no such")]
        assert served.api("rewards", run="sampled")["step"] == 2
    for one in answers:
        assert (one["html"], one["previous"], one["next"], one["progress"]) == ("", None, None, 1)
    assert [one["step"] for one in answers] == [None, None, None, None, 1, None, None]


def test_curves_over_time_and_tokens_and_smoothed(served: Served) -> None:
    chart = r"<h3>Reward</h3>.*?<thead><tr><th scope=\"col\">(\w+)</th>"
    for axis in ("step", "hours", "tokens"):
        html = served.api("run", run="real", axis=axis, smooth=2)["html"]
        columns = re.search(chart, html, re.DOTALL)
        assert columns is not None and columns[1] == axis
        assert "the mean of the last 2 values" in html and "curve raw" in html


def test_runs_of_one_recipe_are_one_curve_with_a_band(runs: Path, tmp_path: Path) -> None:
    for seed in range(3):
        shutil.copytree(
            runs / "real", tmp_path / f"seed{seed}", ignore=shutil.ignore_patterns("model")
        )
        record = json.loads((tmp_path / f"seed{seed}" / "run.json").read_text())
        record["config"]["seed"] = seed
        record["config"]["training"]["learning_rate"] = 0.5 if seed == 2 else 0.25
        (tmp_path / f"seed{seed}" / "run.json").write_text(json.dumps(record))
        write(
            tmp_path / f"seed{seed}" / "metrics.jsonl",
            [{"step": step, "reward/mean": float(step + seed)} for step in (1, 2)],
        )
    with serving(tmp_path) as served:
        names = ["seed0", "seed1", "seed2"]
        html = served.api("compare", run=names, how="seeds")["html"]
    chart = html.partition("<h3>Reward</h3>")[2].partition("</figure>")[0]
    assert "seed0, seed1" in chart and 'class="band"' in chart
    cells = re.findall(r"<td>([^<]*)</td>", chart)
    first, second = ["1", "1.5", "1", "2", "3"], ["2", "2.5", "2", "3", "4"]
    assert cells == first + second


CONTRAST = """
(() => {
  const parts = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (text) => parts(text).slice(0, 3).map((one) => one / 255)
    .map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4))
    .reduce((sum, one, place) => sum + one * [0.2126, 0.7152, 0.0722][place], 0);
  const behind = (one) => {
    for (; one; one = one.parentElement) {
      const colour = getComputedStyle(one).backgroundColor;
      if ((parts(colour)[3] ?? 1) === 1) return colour;
    }
    return getComputedStyle(document.body).backgroundColor;
  };
  const isText = (one) => one.nodeType === 3 && one.data.trim();
  const hasText = (one) => [...one.childNodes].some(isText);
  const seen = (one) => one.offsetWidth && !one.disabled && !one.closest("svg, noscript");
  const texts = [...document.querySelectorAll("body *")].filter((one) => seen(one) && hasText(one));
  return texts.map((one) => {
    const pair = [light(getComputedStyle(one).color), light(behind(one))];
    const [low, high] = pair.sort((a, b) => a - b);
    return [(high + 0.05) / (low + 0.05), one.outerHTML.slice(0, 90)];
  }).filter(([ratio]) => ratio < 4.5);
})()
"""
"""The texts whose contrast is below what WCAG 2.2 asks for (1.4.3, level AA)."""
UNNAMED = """
[...document.querySelectorAll("input, select, button, a[href]")].filter((one) => one.offsetWidth)
  .filter((one) => !(one.ariaLabel || one.innerText.trim() || (one.labels && one.labels.length)))
  .map((one) => one.outerHTML)
"""


def check_looks(page: Page, port: int) -> None:
    """Nothing stands out at the right, every control has a name, every text can be read, and
    nothing came from elsewhere.
    """
    assert page.run("document.documentElement.scrollWidth - innerWidth") <= 0
    assert page.run(UNNAMED) == []
    assert page.run(CONTRAST) == []
    own = f"http://127.0.0.1:{port}/{TOKEN}/"
    assert {one for one in page.requests if not one.startswith((own, "data:,"))} <= {"about:blank"}
    assert page.errors == []


@pytest.mark.exhaustive
@pytest.mark.skipif(find_chromium() is None, reason="no Chromium is installed")
@pytest.mark.timeout(240)
def test_the_page_in_chromium_wide_and_narrow_light_and_dark(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs, tmp_path / "runs")
    metrics = tmp_path / "runs" / "real" / "metrics.jsonl"
    with serving(tmp_path / "runs") as served, browser(tmp_path / "profile") as page:
        home = f"http://127.0.0.1:{served.port}/{TOKEN}/"
        last = served.api("completions", run="other")["rows"][0]["place"]
        views = {
            "": "document.querySelectorAll('tbody tr').length === 2",
            "#/run?run=real": "document.querySelector('figure svg .curve')",
            "#/rewards?run=real": "document.querySelector('figure svg .band')",
            "#/completions?run=real&kept=1": "document.querySelectorAll('tbody tr').length === 18",
            f"#/completion?run=other&place={last}": "document.querySelectorAll('.turn').length",
            "#/compare?run=real&run=other&how=paired": "document.querySelector('.compared')",
            "#/pairs?run=real&run=other&kept=0": "document.querySelector('tbody tr')",
        }
        for view, condition in views.items():
            page.open(home + view)
            page.wait(condition)
            for width, scheme in ((1280, "light"), (1280, "dark"), (390, "dark"), (390, "light")):
                page.look_like(width, 900, scheme)
                check_looks(page, served.port)

        page.open(home + f"#/completion?run=other&place={last}")  # hostile text is text
        page.wait("document.querySelector('.call')")
        assert "<img src=x" in page.run("document.querySelector('.turn').innerText")
        assert "[U+202E]" in page.run("document.querySelector('.turn').innerText")
        assert page.run("document.images.length") == 0
        calls = page.run("[...document.querySelectorAll('.call')].map((one) => one.textContent)")
        called = '<tool_call>{"name": "add"}</tool_call>', "[add(3, 4)]"
        assert calls == [*called, '{"name": "add", "parameters": {"a": 3}}']
        title = page.run("document.querySelector('.turn b').textContent")
        assert title == "turn 1, the model, reward \u22120.25"
        page.run("document.querySelector('.tokens .t').focus()")
        page.press("ArrowRight")
        assert page.run("document.activeElement === document.querySelectorAll('.tokens .t')[1]")

        learnt = served.api("completions", run="real", kept=1, source="train")["rows"][0]["place"]
        page.open(home + f"#/completion?run=real&kept=1&place={learnt}")
        page.wait("document.querySelector('[data-by=advantage]')")
        page.run("document.querySelector('[data-by=advantage]').click()")
        assert page.run("document.querySelectorAll('.shades .d3, .shades .a3').length") == 2
        for scheme in ("light", "dark"):
            page.look_like(390, 900, scheme)
            check_looks(page, served.port)

        page.run("document.querySelector('[data-key=p], [data-key=n]').focus()")
        before = page.run("location.hash")
        page.press("n" if page.run("Boolean(document.querySelector('[data-key=n]'))") else "p")
        page.wait(f"location.hash !== {json.dumps(before)}")
        page.wait("document.querySelector('.tokens .t')")

        page.open(home + "#/run?run=real")
        page.wait("document.querySelector('figure')")
        page.run(
            "[...document.querySelectorAll('select')].forEach((one, at) => "
            "{ one.value = at ? '5' : 'hours'; one.dispatchEvent(new Event('change')); })"
        )
        page.wait("document.querySelector('figure .raw')")
        assert "axis=hours" in page.run("location.hash")

        page.open(home)  # without an answer each view says that it loads, and no empty table
        page.run("window.fetch = () => new Promise(() => {})")
        for view in ("run?run=real", "completions?run=real", "compare?run=real&run=other"):
            page.run(f"location.hash = '#/{view}'")
            page.wait("document.body.innerText.includes('Loading\u2026')")
            assert not page.run(
                "[...document.querySelectorAll('button')].some((one) => "
                "one.offsetWidth && one.innerText === 'Further completions')"
            )
        page.open(home + "#/completions?run=real")
        page.wait("document.querySelectorAll('tbody tr').length === 18")
        assert page.run("[...document.querySelectorAll('select')].at(-1).value") == "1"

        page.open(home + "#/completions?run=real&kept=1")
        page.wait("document.querySelector('tbody tr')")
        page.run("document.querySelector('select').value = 'eval'")
        page.run("document.querySelector('form').requestSubmit()")
        page.wait("document.querySelectorAll('tbody tr').length === 6")
        assert "source=eval" in page.run("location.hash")

        page.open(home + "#/run?run=real")  # it grows while it is looked at
        page.wait("document.querySelector('figure')")
        with metrics.open("a") as file:
            file.write(json.dumps({"step": 3, "reward/mean": 4321.0}) + "\n")
        page.wait("document.body.innerText.includes('4,321')")
        shutil.rmtree(tmp_path / "runs" / "real")
        page.open(home)
        page.wait("document.querySelectorAll('tbody tr').length === 1")
        assert page.errors == []
