"""Writes the figures of a run as TensorBoard events, in one file for each process.

TensorBoard reads the files of a folder in the order of their names, which begin with a time, and
takes a step that is not above the previous one for a restart.  A clock that is set back, or the
slower clock of another host, would put the steps of a resumed run before those of the run.
Therefore a new file is named after the newest one, and no event is older than the previous one.
"""

import os
import re
import socket
import time
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import (
    Event,  # pyright: ignore[reportAttributeAccessIssue]  # protobuf makes it
)
from tensorboard.compat.proto.summary_pb2 import (
    Summary,  # pyright: ignore[reportAttributeAccessIssue]  # likewise
)
from tensorboard.compat.proto.tensor_pb2 import (
    TensorProto,  # pyright: ignore[reportAttributeAccessIssue]  # likewise
)
from tensorboard.compat.proto.tensor_shape_pb2 import (
    TensorShapeProto,  # pyright: ignore[reportAttributeAccessIssue]  # likewise
)
from tensorboard.compat.proto.types_pb2 import (
    DataType,  # pyright: ignore[reportAttributeAccessIssue]  # likewise
)
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.record_writer import RecordWriter

from isobit.store.directory import EVENTS_SUFFIX
from isobit.util.files import LineFile

_NAME = re.compile(r"events\.out\.tfevents\.(\d+)\.")


class Events:
    """The file of this process, which the constructor creates."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError and StorageError where it cannot be written."""
        folder.mkdir(parents=True, exist_ok=True)
        began = max(int(time.time()), _newest(folder) + 1)
        process = f"{socket.gethostname()}.{os.getpid()}"
        name = f"events.out.tfevents.{began:010d}.{process}.0{EVENTS_SUFFIX}"
        self._file = LineFile(folder / name)
        self._latest = float(began)
        self._write(Event(file_version="brain.Event:2"))

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        self._write(Event(step=step, summary=Summary(value=values)))

    def write_text(self, step: int, name: str, text: str) -> None:
        """Markdown, for the page Text."""
        tensor = TensorProto(
            dtype=DataType.DT_STRING,
            string_val=[text.encode()],
            tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
        )
        value = Summary.Value(
            tag=name, metadata=create_summary_metadata(name, description=""), tensor=tensor
        )
        self._write(Event(step=step, summary=Summary(value=[value])))

    def close(self) -> None:
        self._file.close()

    def _write(self, event: Event) -> None:
        self._latest = event.wall_time = max(self._latest, time.time())
        record = BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        self._file.write(record.getvalue())


def _newest(folder: Path) -> int:
    """The time in the last file's name; 0 without one."""
    times = [int(match[1]) for path in folder.iterdir() if (match := _NAME.match(path.name))]
    return max(times, default=0)
