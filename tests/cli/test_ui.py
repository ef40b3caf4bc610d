import os
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

import pytest

from isobit.cli import ui
from isobit.cli.main import main


def test_the_viewer_is_served_at_its_address_until_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ui", str(tmp_path / "absent")]) == 2
    assert "is no folder; name the folder that holds the runs" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setattr(ui.secrets, "token_urlsafe", lambda size: "t" * size)
    address = f"http://127.0.0.1:{port}/{'t' * 24}/"
    found = list[bytes]()

    def look() -> None:
        for _ in range(200):
            with suppress(OSError), urlopen(address, timeout=10) as answer:
                found.append(answer.read())
                break
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=look)
    thread.start()
    try:
        assert main(["ui", str(tmp_path), "--port", str(port)]) == 0
    finally:
        thread.join(30)
        signal.signal(signal.SIGTERM, before)
    assert address in capsys.readouterr().out
    assert len(found) == 1 and b"viewer.js" in found[0]
