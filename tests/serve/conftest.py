from collections.abc import Iterator

import pytest

from tests.serve.servers import Running, chat_folder, serving


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The starter with a chat template in ``fp8``, few pages and places, for all tests here. A
    test that pushes other weights pushes the first ones back.
    """
    place = tmp_path_factory.mktemp("server")
    (place / "weights").mkdir()
    with serving(
        chat_folder(place), place, "--name", "chatty", "--max-live", "48", "--precision", "fp8",
        "--allow-weight-updates", str(place / "weights"), "--rollout.kv_pages", "20",
        "--rollout.max_batched_tokens", "100",
    ) as running:  # fmt: skip
        yield running
        assert running.end() == 0
        assert "Traceback" not in running.log.read_text()
