"""``isobit ui RUNS``: a viewer of runs in the browser (docs/ui.md)."""

import secrets
import signal
from collections.abc import Sequence

from isobit.cli.listening import PLAIN_HTTP, check_packages, listening_socket
from isobit.cli.options import Command, option, path_value, whole
from isobit.util.errors import ConfigError

_COMMAND = Command(
    "ui",
    "Show the runs of a folder in the browser: curves as they grow, every completion that was "
    "written with its tokens and rewards, and comparisons.  The page is served to this machine "
    "alone, at the address that is printed.",
    [
        option(
            "runs RUNS",
            "a folder that holds runs, at most four folders deep, or a run's directory",
            path_value,
            nargs="+",
        ),
        option("--port PORT", "by default 8765; 0 takes a free one", whole(0, 65535), default=8765),
    ],
)


def run_ui(arguments: Sequence[str]) -> int:
    """Serve the viewer until SIGTERM or Ctrl-C. Raises ConfigError for a folder that is none."""
    options = _COMMAND.read(arguments)
    check_packages("ui", ("starlette", "uvicorn"))
    for folder in options.runs:
        if not folder.is_dir():
            raise ConfigError(f"{str(folder)!r} is no folder; name the folder that holds the runs")
    with listening_socket("127.0.0.1", options.port) as listener:
        import uvicorn

        from isobit.observe.viewer import Viewer
        from isobit.serve.connections import HttpConnection

        port, token = listener.getsockname()[1], secrets.token_urlsafe(24)
        app = Viewer(options.runs).app(token, port)
        config = uvicorn.Config(
            app, lifespan="off", http=HttpConnection, timeout_graceful_shutdown=1, **PLAIN_HTTP
        )
        print(f"isobit: the runs are at http://127.0.0.1:{port}/{token}/", flush=True)
        for number in (signal.SIGTERM, signal.SIGINT):
            # uvicorn raises the signal again that has ended it: a graceful end is no failure
            signal.signal(number, lambda *_: None)
        uvicorn.Server(config).run(sockets=[listener])
    return 0
