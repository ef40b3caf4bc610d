"""Drives a headless Chromium through its debugging pipe, for the test of the viewer and for its
picture.  Chromium is the system's (``apt-get install chromium``); nothing else is needed.

    python -m tools.browser RUNS NAME PLACE

writes docs/pictures/viewer.png: a kept completion of the run NAME below the folder RUNS.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

NAMES = ("chromium", "chromium-browser", "google-chrome")
START_S, ANSWER_S = 60.0, 60.0


def find_chromium() -> str | None:
    """The path of a Chromium; None where none is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """A tab of a browser that listens at a pair of pipes."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._count, self._unread, self._session = 0, b"", ""
        self.errors: list[str] = []
        """What the page has thrown, or was refused by its own policy."""
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self._ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable")
        self.requests: list[str] = []
        """Every address that the page has asked for."""

    def _ask(self, method: str, **values: Any) -> dict[str, Any]:
        """Send a command; -> its result.  Raises RuntimeError for an error, TimeoutError."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": values}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + ANSWER_S
        while True:
            answer = self._next(until)
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._note(answer)

    def _next(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._unread:
            if not select.select([self._answers], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError(f"the browser has not answered within {ANSWER_S} s")
            read = os.read(self._answers, 1 << 20)
            if not read:
                raise RuntimeError("the browser has ended")
            self._unread += read
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        values = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(values["exceptionDetails"].get("exception", values)))
        if event.get("method") == "Log.entryAdded" and values["entry"]["level"] == "error":
            self.errors.append(values["entry"]["text"])
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])

    def look_like(self, width: int, height: int, scheme: str) -> None:
        """A window of so many pixels, ``light`` or ``dark``."""
        self._ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self._ask("Emulation.setEmulatedMedia", features=[feature])

    def open(self, address: str) -> None:
        """Load an address, also where only what follows its ``#`` is another."""
        for url in ("about:blank", address):
            self._ask("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """The value of an expression in the page, awaited.  Raises RuntimeError where it throws."""
        found = self._ask(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            raise RuntimeError(f"{script}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def wait(self, condition: str, seconds: float = 30.0) -> None:
        """Wait until an expression is true.  Raises TimeoutError with the page's text."""
        until = time.monotonic() + seconds
        while not self.run(f"Boolean({condition})"):
            if time.monotonic() > until:
                text = self.run("document.body.innerText")
                raise TimeoutError(f"{condition} is not so after {seconds} s:\n{text}")
            time.sleep(0.05)

    def press(self, key: str) -> None:
        """Press and release a key, by its name in the browser: ``Tab``, ``ArrowRight``."""
        code = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowRight": 39, "n": 78, "p": 80}[key]
        for kind in ("keyDown", "keyUp"):
            self._ask(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code
            )

    def photograph(self, path: Path, whole: bool = False) -> None:
        """Write the window, or the ``whole`` page, as PNG."""
        found = self._ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A page of a browser that ends with the block; ``profile`` is a new folder.  Raises
    RuntimeError where there is none.
    """
    program = find_chromium()
    if program is None:
        raise RuntimeError("no Chromium is installed (apt-get install chromium)")
    commands, answers = os.pipe(), os.pipe()
    options = ["--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu"]
    options += [f"--user-data-dir={profile}", "--disable-dev-shm-usage", "--hide-scrollbars"]
    if os.geteuid() == 0:
        options.append("--no-sandbox")  # Chromium refuses root with it

    # Chromium reads commands at descriptor 3 and answers at 4
    line = f'exec "$0" "$@" 3<&{commands[0]} 4>&{answers[1]}'
    process = subprocess.Popen(  # noqa: S603
        ["/bin/bash", "-c", line, program, *options],
        pass_fds=(commands[0], answers[1]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(commands[0])
    os.close(answers[1])
    try:
        yield Page(commands[1], answers[0])
    finally:
        os.close(commands[1])  # which ends it
        os.close(answers[0])
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "viewer.png"


def main(folder: str, run: str, place: str) -> None:
    """Photograph a completion, its tokens shaded by log-probability."""
    command = [sys.executable, "-m", "isobit.cli.main", "ui", folder, "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603
    assert server.stdout is not None
    try:
        address = server.stdout.readline().split()[-1]
        with tempfile.TemporaryDirectory() as place_of, browser(Path(place_of) / "profile") as page:
            page.look_like(1000, 780, "light")
            query = urlencode({"run": run, "kept": 1, "place": place})
            page.open(f"{address}#/completion?{query}")
            page.wait("document.querySelector('.tokens .t')")
            page.photograph(PICTURE)
    finally:
        server.terminate()
        server.wait(30)


if __name__ == "__main__":
    main(*sys.argv[1:])
