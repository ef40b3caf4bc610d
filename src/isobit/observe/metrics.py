"""Writes the metrics of a run to ``metrics.jsonl``, TensorBoard and the services of
``tracking.to``: Weights & Biases, MLflow, trackio and SwanLab.

A line of ``metrics.jsonl`` is one object with ``step`` and the metrics of that step, or of the
evaluation after it; one that is not finite is null.  Every line is flushed when it is written.  The
names are those of ``isobit.records.metrics``.  Services also get the sample completions as a table,
and TensorBoard as text where ``tracking.to`` names it.

TensorBoard reads the files of a folder in the order of their names, which begin with a time, and
takes a step that is not above the previous one for a restart.  A clock that is set back, or the
slower clock of another host, would put the steps of a resumed run before those of the run.
Therefore a new file is named after the newest one, and no event is older than the previous one.

This is the only module that imports the packages of TensorBoard and the services, by name, since
any of them may be missing.  (accelerate's trackers would need accelerate's process state, which
starts torch.distributed under torchrun; the packages themselves are called in as few lines.)  A
run's directory keeps the run's id of each service, ``wandb_id`` for example, so that a resumed run
continues there; wandb ignores the metrics of steps that are repeated after a kill, and MLflow keeps
the last value of a step.
"""

import math
import os
import re
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar, Self
from uuid import uuid4

from isobit.config.tables import TrackerName, TrackingConfig
from isobit.records.metrics import Metrics
from isobit.store.journals import EVENTS_SUFFIX
from isobit.util.disk_space import LineFile
from isobit.util.errors import ConfigError
from isobit.util.plain_files import read_plain
from isobit.util.strict_json import json_line, json_text

Row = Mapping[str, Any]
COLUMNS = ("prompt", "completion", "reward", "answer", "finish_reason", "tokens")
"""Columns of a table of sample completions."""


class MetricsWriter:
    """Appends metrics to ``metrics.jsonl`` and a TensorBoard folder, and sends them to services; a
    context manager.  Without the package tensorboard, ``say`` prints a note.

    A service that fails during the run does not end it: ``say`` tells the first failure of each,
    and their number at the end.
    """

    def __init__(
        self,
        jsonl: Path,
        tensorboard: Path,
        trackers: Sequence["Tracker"] = (),
        say: Callable[[str], None] = print,
        with_texts: bool = False,
    ) -> None:
        self._trackers, self._say = trackers, say
        self._failed: dict[str, int] = {}
        self._lines = LineFile(jsonl)
        self._events = _open_events(tensorboard, say)
        self._texts = self._events if with_texts else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._lines.close()
        if self._events is not None:
            self._events.close()
        for tracker in self._trackers:
            self._send(tracker, partial(tracker.close, error is not None))
        for name, times in self._failed.items():
            self._say(f"note: {name} failed {times} times; metrics.jsonl has every figure")

    def writes(self, step: int, metrics: Metrics) -> list[Callable[[], None]]:
        """The calls that write the line, the events and to the services; each flushes, and one that
        raised StorageError may be called again.
        """
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        made: list[Callable[[], None]] = [
            partial(self._lines.write, json_line({"step": step, **finite}))
        ]
        if self._events is not None:
            made.append(partial(self._events.write, step, metrics))
        return made + [
            partial(self._send, tracker, partial(tracker.write, step, metrics))
            for tracker in self._trackers
        ]

    def tables(self, step: int, source: str, rows: Sequence[Row]) -> list[Callable[[], None]]:
        """The calls that send a table of completions of a step, or of the evaluation after it."""
        values = [[row.get(column) for column in COLUMNS] for row in rows]
        made: list[Callable[[], None]] = [
            partial(self._send, tracker, partial(tracker.table, step, source, values))
            for tracker in self._trackers
        ]
        if self._texts is not None:
            text = _markdown(values)
            made.append(partial(self._texts.write_text, step, f"completions/{source}", text))
        return made

    def _send(self, tracker: "Tracker", call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # each package raises types of its own
            name = tracker.service
            if name not in self._failed:
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                self._say(
                    f"note: {name} did not take what was sent to it ({reason}); the run goes on, "
                    "and metrics.jsonl has every figure"
                )
            self._failed[name] = self._failed.get(name, 0) + 1


def _markdown(rows: Sequence[Sequence[Any]]) -> str:
    def cell(value: Any) -> str:
        text = "" if value is None else str(value)
        return " ".join(text.split()).replace("|", "\\|")

    lines = [COLUMNS, ["---"] * len(COLUMNS), *([cell(value) for value in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


class Events:
    """A file of TensorBoard's events, one for each process, which the constructor creates."""

    def __init__(self, folder: Path) -> None:
        """Raises ImportError without tensorboard, OSError and StorageError where the file cannot be
        written.
        """
        self._proto = {
            name: import_module(f"tensorboard.compat.proto.{name}_pb2")
            for name in ("event", "summary", "tensor", "tensor_shape", "types")
        }
        self._record_writer = import_module("tensorboard.summary.writer.record_writer").RecordWriter
        self._text_metadata = import_module(
            "tensorboard.plugins.text.metadata"
        ).create_summary_metadata
        folder.mkdir(parents=True, exist_ok=True)
        began = max(int(time.time()), _newest(folder) + 1)
        process = f"{socket.gethostname()}.{os.getpid()}"
        name = f"events.out.tfevents.{began:010d}.{process}.0{EVENTS_SUFFIX}"
        self._file = LineFile(folder / name)
        self._latest = float(began)
        self._write(file_version="brain.Event:2")

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self._summarise(step, [{"tag": name, "simple_value": figures[name]} for name in figures])

    def write_text(self, step: int, name: str, text: str) -> None:
        """Markdown, for the page Text."""
        shape = self._proto["tensor_shape"].TensorShapeProto
        tensor = self._proto["tensor"].TensorProto(
            dtype=self._proto["types"].DT_STRING,
            string_val=[text.encode()],
            tensor_shape=shape(dim=[shape.Dim(size=1)]),
        )
        metadata = self._text_metadata(name, description="")
        self._summarise(step, [{"tag": name, "metadata": metadata, "tensor": tensor}])

    def close(self) -> None:
        self._file.close()

    def _summarise(self, step: int, values: Sequence[Mapping[str, Any]]) -> None:
        summary = self._proto["summary"].Summary
        self._write(step=step, summary=summary(value=[summary.Value(**value) for value in values]))

    def _write(self, **fields: Any) -> None:
        event = self._proto["event"].Event(**fields)
        self._latest = event.wall_time = max(self._latest, time.time())
        record = BytesIO()
        self._record_writer(record).write(event.SerializeToString())
        self._file.write(record.getvalue())


_NAME = re.compile(r"events\.out\.tfevents\.(\d+)\.")


def _newest(folder: Path) -> int:
    """The time in the last file's name; 0 without one."""
    times = [int(match[1]) for path in folder.iterdir() if (match := _NAME.match(path.name))]
    return max(times, default=0)


def _open_events(folder: Path, say: Callable[[str], None]) -> Events | None:
    try:
        return Events(folder)
    except ImportError:
        say(
            "note: the package tensorboard is not installed: no events are written; metrics.jsonl "
            "has every figure"
        )
        return None


def check_packages(services: Iterable[TrackerName]) -> None:
    """Raise ConfigError for a service whose package is missing; contacts none."""
    for name in services:
        if name in TRACKERS:
            _package(name)


def check_services(services: Collection[TrackerName]) -> None:
    """Raise ConfigError, before anything is loaded or written, for a service whose package or login
    is missing.  On a terminal wandb asks for the key; with WANDB_MODE=offline it needs none.
    """
    check_packages(services)
    if "wandb" in services:
        try:
            _package("wandb").login()
        except Exception as error:  # its own classes of error differ from version to version
            raise _refusal("wandb", error) from error


def open_trackers(
    tracking: TrackingConfig, root: Path, settings: dict[str, Any]
) -> list["Tracker"]:
    """One for each service that ``tracking`` asks for.  ``settings`` is the resolved configuration.

    Raises ConfigError where one cannot be started.
    """
    made: list[Tracker] = []
    for name, project in tracking.services().items():
        if name in TRACKERS:
            try:
                made.append(TRACKERS[name](tracking, project, root, settings))
            except ConfigError:
                raise
            except Exception as error:  # see above
                raise _refusal(name, error) from error
    return made


class Tracker:
    """A run at a service whose package has wandb's interface: ``init``, ``log``, ``finish``."""

    service: ClassVar[TrackerName] = "wandb"
    remedy: ClassVar[str] = "run `wandb login`, set WANDB_MODE=offline"

    def __init__(
        self, tracking: TrackingConfig, project: str, root: Path, settings: dict[str, Any]
    ) -> None:
        self._library = _package(self.service)
        name = tracking.name or root.resolve().name
        self._start(project, name, list(tracking.tags), root, settings)

    def _start(
        self, project: str, name: str, tags: list[str], root: Path, settings: dict[str, Any]
    ) -> None:
        self._run = self._library.init(
            project=project,
            name=name,
            id=_run_id(root / "wandb_id"),
            resume="allow",
            dir=str(root),
            config=settings,
            **({"tags": tags} if tags else {}),
        )

    def write(self, step: int, metrics: Metrics) -> None:
        """Send the metrics of one step, or of the evaluation after it."""
        self._run.log(metrics, step=step)

    def table(self, step: int, source: str, rows: Sequence[Sequence[Any]]) -> None:
        """Send completions, whose values are those of ``COLUMNS``."""
        table = self._library.Table(columns=list(COLUMNS), data=_plain(rows))
        self._run.log({f"completions/{source}": table}, step=step)

    def close(self, failed: bool) -> None:
        """Wait until everything has been sent; ``failed`` says whether the run ended early."""
        self._run.finish(exit_code=int(failed))


class TrackioTracker(Tracker):
    """trackio knows a run by its name, which therefore ends in the id."""

    service = "trackio"
    remedy = "see `trackio show`"

    def _start(
        self, project: str, name: str, tags: list[str], root: Path, settings: dict[str, Any]
    ) -> None:
        self._run = self._library.init(
            project=project,
            name=f"{name}-{_run_id(root / 'trackio_id')}",
            resume="allow",
            config={**settings, **({"tags": tags} if tags else {})},
        )

    def table(self, step: int, source: str, rows: Sequence[Sequence[Any]]) -> None:
        from pandas import DataFrame  # trackio needs it

        table = self._library.Table(dataframe=DataFrame(_plain(rows), columns=list(COLUMNS)))
        self._run.log({f"completions/{source}": table}, step=step)

    def close(self, failed: bool) -> None:
        self._run.finish()


class SwanLabTracker(Tracker):
    service = "swanlab"
    remedy = "run `swanlab login`, set SWANLAB_MODE=local"

    def _start(
        self, project: str, name: str, tags: list[str], root: Path, settings: dict[str, Any]
    ) -> None:
        self._run = self._library.init(
            project=project,
            experiment_name=name,
            id=_run_id(root / "swanlab_id", 21),  # its length
            resume="allow",
            logdir=str(root / "swanlog"),
            config=settings,
            **({"tags": tags} if tags else {}),
        )

    def table(self, step: int, source: str, rows: Sequence[Sequence[Any]]) -> None:
        text = self._library.Text(_markdown(rows))
        self._run.log({f"completions/{source}": text}, step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(**({"state": "crashed", "error": "ended early"} if failed else {}))


class MlflowTracker(Tracker):
    """A run of an experiment, where ``MLFLOW_TRACKING_URI`` says."""

    service = "mlflow"
    remedy = "set MLFLOW_TRACKING_URI to a server or a folder that can be reached"

    def _start(
        self, project: str, name: str, tags: list[str], root: Path, settings: dict[str, Any]
    ) -> None:
        path = root / "mlflow_id"
        self._library.set_experiment(project)
        known = read_plain(path).decode() if path.exists() else None
        run = self._library.start_run(run_id=known, run_name=name, tags=dict.fromkeys(tags, ""))
        if known is None:  # parameters of a run cannot be changed
            path.write_text(run.info.run_id, encoding="utf-8")
            self._library.log_dict(settings, "config.json")
            flat = _flat(settings)
            for first in range(0, len(flat), 100):  # as many as one call takes
                self._library.log_params(dict(flat[first : first + 100]))

    def write(self, step: int, metrics: Metrics) -> None:
        named = {_mlflow_name(name): value for name, value in metrics.items()}
        self._library.log_metrics(named, step=step)

    def table(self, step: int, source: str, rows: Sequence[Sequence[Any]]) -> None:
        content = {"columns": list(COLUMNS), "data": _plain(rows)}  # as its log_table writes
        place = f"completions/{_mlflow_name(source)}/step_{step:06}.json"
        self._library.log_text(json_text(content), place)

    def close(self, failed: bool) -> None:
        self._library.end_run("FAILED" if failed else "FINISHED")


TRACKERS: dict[TrackerName, type[Tracker]] = {
    kind.service: kind for kind in (Tracker, MlflowTracker, TrackioTracker, SwanLabTracker)
}


def _mlflow_name(name: str) -> str:
    """A metric's name as MLflow takes it, which refuses a whole batch for one name that is no path
    of letters, digits, spaces and ``_-.:``: ``pass_at_2`` for ``pass@2``.
    """
    text = re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"))
    return "/".join(one if one.strip(".") else "_" for one in text.split("/"))[:250]


def _plain(rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Rows whose columns have one type each: an answer may be a number or text."""
    place = COLUMNS.index("answer")
    return [
        [None if value is None else str(value) if at == place else value for at, value in found]
        for found in map(enumerate, rows)
    ]


def _flat(table: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """The settings by dotted key; MLflow takes 500 characters of a value, and few in a key."""
    found: list[tuple[str, str]] = []
    for key, value in table.items():
        name = prefix + "".join(one if one.isalnum() or one in "_-." else "_" for one in str(key))
        if isinstance(value, Mapping):
            found += _flat(value, f"{name}.")
        else:
            found.append((name[:250], str(value)[:500]))
    return found


def _refusal(name: TrackerName, error: Exception) -> ConfigError:
    reason = " ".join(str(error).split()).rstrip(".")
    return ConfigError(
        f"tracking names {name}, which cannot start ({reason}): {TRACKERS[name].remedy}, or leave "
        "it out of tracking"
    )


def _package(name: TrackerName) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"tracking names {name}, but the package {name} is not installed: pip install {name}, "
            "or leave it out of tracking"
        ) from error


def _run_id(path: Path, length: int = 12) -> str:
    """The id of this run at a service, created the first time."""
    if not path.exists():
        path.write_text(uuid4().hex[:length], encoding="utf-8")
    return read_plain(path).decode()
