"""Names of the hub, without a network: a cache that is there, one that is not, and what would be
fetched.
"""

import shutil
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.errors import (
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors.torch import load_file

from isobit.config.precision import PrecisionConfig
from isobit.models.folder import load_model, model_folder
from isobit.models.hub import hub_folder, is_hub_name
from isobit.models.policy import random_policy
from isobit.models.safetensors import INDEX_FILE, WEIGHTS_FILE, write_shards
from isobit.models.saving import save_policy
from isobit.starter import starter_folder
from isobit.util.errors import ModelError
from tests.models.test_folder import make_config

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no way to the hub."""

    def request(*_: Any, **__: Any) -> Any:
        raise AssertionError("a request to the hub")

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", request)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_tree", request)
    return tmp_path / "cache"


def put(cache: Path, source: Path, files: Sequence[str], ref: str = "main") -> Path:
    """A snapshot as the hub's library lays it out: files as links to blobs."""
    repository = cache / "models--org--name"
    snapshot = repository / "snapshots" / COMMIT
    for folder in (repository / "blobs", repository / "refs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    (repository / "refs" / ref).write_text(COMMIT)
    for file in files:
        shutil.copyfile(source / file, repository / "blobs" / f"blob-{file}")
        (snapshot / file).unlink(missing_ok=True)
        (snapshot / file).symlink_to(Path("../../blobs") / f"blob-{file}")
    return snapshot


def starter_files() -> list[str]:
    return [file.name for file in starter_folder().iterdir() if file.is_file()]


def test_what_is_a_name_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for name in ("org/name", "Qwen/Qwen2.5-0.5B", "org/name@main", "org/name@refs/pr/1"):
        assert is_hub_name(name)
    for name in ("starter", "name", "/org/name", "a/b/c", "org/", "../name", "org/name@", "org/..",
                 "org/name@../x", "runs/model", "org name/x"):  # fmt: skip
        assert not is_hub_name(name), name
        if name != "starter":
            assert model_folder(name) == Path(name)


@pytest.mark.parametrize("name", ["org/name", f"org/name@{COMMIT}", "org/name@main"])
def test_a_cached_model_is_loaded_without_a_request(
    cache: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = put(cache, starter_folder(), starter_files())
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert model_folder(name).resolve() == snapshot.resolve()
    model = load_model(name, PrecisionConfig(preset="fp8"), trainable=False)
    expected = load_model("starter", PrecisionConfig(preset="fp8"), trainable=False)
    table = "embed_tokens.weight"
    weights = (one.policy.weights("rollout").plain[table] for one in (model, expected))
    assert torch.equal(*weights)


def test_offline_and_not_cached(cache: Path) -> None:
    with pytest.raises(
        ModelError, match=r"org/name@v2 is no folder here.* not in the cache .*HF_H"
    ):
        model_folder("org/name@v2")
    put(cache, starter_folder(), ["config.json", "tokenizer.json"])
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE forbids to fetch it"):
        hub_folder("org/name")  # an interrupted fetch: the weights are missing
    put(cache, starter_folder(), starter_files())
    assert hub_folder("org/name").is_dir()


class Hub:
    """``snapshot_download`` of a repository that is a folder, into the cache."""

    def __init__(self, cache: Path, repository: Path) -> None:
        self._cache, self._repository = cache, repository
        self.asked: list[tuple[str | None, list[str]]] = []
        self.error: Exception | None = None

    def __call__(
        self, name: str, revision: str | None = None, local_files_only: bool = False, **kwargs: Any
    ) -> str:
        if local_files_only:
            return _cached(name, revision=revision, local_files_only=True, **kwargs)
        if self.error is not None:
            raise self.error
        self.asked.append((revision, kwargs["allow_patterns"]))
        files = [
            file.name
            for file in self._repository.iterdir()
            if any(fnmatch(file.name, pattern) for pattern in kwargs["allow_patterns"])
        ]
        return str(put(self._cache, self._repository, files))


_cached = huggingface_hub.snapshot_download


@pytest.fixture
def hub(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    repository = tmp_path / "repository"
    shutil.copytree(starter_folder(), repository)
    made = Hub(cache, repository)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made)
    return made


def test_safetensors_and_descriptions_are_fetched_and_nothing_else(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = tmp_path / "repository"
    for file in ("pytorch_model.bin", "modeling_own.py", "consolidated.safetensors", "run.sh"):
        (repository / file).write_bytes(b"no")
    folder = hub_folder("org/name")
    assert "fetching org/name from the hub" in capsys.readouterr().err
    names = {file.name for file in folder.iterdir()}
    assert {"config.json", "tokenizer.json", WEIGHTS_FILE} <= names
    assert not {file for file in names if file.endswith((".bin", ".py", ".sh"))}
    assert {file for file in names if file.endswith(".md")} == {"README.md"}, "for its licence"
    assert "consolidated.safetensors" not in names
    assert [revision for revision, _ in hub.asked] == [None, COMMIT], "one commit for both turns"
    hub_folder("org/name")
    assert len(hub.asked) == 2, "what is cached is not asked for again"


def test_the_shards_of_an_index_are_fetched(hub: Hub, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    tensors = load_file(repository / WEIGHTS_FILE)
    (repository / WEIGHTS_FILE).unlink()
    write_shards(repository, tensors, tensors.__getitem__, 1_000_000)
    shards = {file.name for file in repository.glob("*.safetensors")}
    assert len(shards) > 1 and (repository / INDEX_FILE).is_file()
    folder = hub_folder("org/name@v2")
    assert {file.name for file in folder.glob("*.safetensors")} == shards
    assert set(hub.asked[1][1]) == shards


def error_of(kind: type[Exception]) -> Exception:
    """As the library makes it, but without a response of its HTTP client."""
    error = kind.__new__(kind)
    Exception.__init__(error, "404")
    return error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (error_of(RepositoryNotFoundError), "the hub has no such model, or none that you may read"),
        (error_of(RevisionNotFoundError), "the hub has org/name, but no revision v9"),
        (OSError("no route\nto host"), "cannot be fetched from the hub: OSError: no route; check"),
        (ValueError("\x1b[31m"), r"ValueError: '\\x1b\[31m'; check the network"),
    ],
)
def test_what_the_hub_does_not_give(hub: Hub, error: Exception, message: str) -> None:
    hub.error = error
    with pytest.raises(ModelError, match=message):
        model_folder("org/name@v9")


def test_a_model_without_safetensors(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "repository" / WEIGHTS_FILE).unlink()
    with pytest.raises(ModelError, match=r"pickled weights \(\.bin, \.pt\) are not read"):
        load_model("org/name", PrecisionConfig(preset="fp8"))


def test_an_index_of_the_hub_that_names_a_file_outside(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "repository" / INDEX_FILE).write_text(
        '{"weight_map": {"a": "../../x.safetensors"}}'
    )
    with pytest.raises(ModelError, match="outside of the folder"):
        hub_folder("org/name")


def test_a_snapshot_of_another_make(tmp_path: Path, cache: Path) -> None:
    """A folder of random weights in the cache is read through its links, shards and all."""
    policy = random_policy(make_config(), PrecisionConfig(preset="fp32"), seed=0)
    save_policy(policy, tmp_path / "own", limit=100_000)
    files = [file.name for file in (tmp_path / "own").iterdir()]
    assert len(files) > 3
    folder = model_folder("org/name") if put(cache, tmp_path / "own", files) else None
    assert folder is not None and (folder / INDEX_FILE).is_file()


def test_a_plan_needs_the_description_alone(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights that are not there are not fetched, and those that are there are found."""
    asked: list[Sequence[str]] = []
    description = [file for file in starter_files() if not file.endswith(".safetensors")]

    def download(repository: str, *, allow_patterns: Sequence[str], **options: Any) -> str:
        if options.get("local_files_only"):
            raise LocalEntryNotFoundError("nothing is cached")
        asked.append(allow_patterns)
        return str(put(cache, starter_folder(), description))

    real = huggingface_hub.snapshot_download
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    folder = model_folder("org/name", weights=False)
    assert (folder / "config.json").is_file() and len(asked) == 1
    assert not any(fnmatch(WEIGHTS_FILE, pattern) for pattern in asked[0])
    assert "fetching config and tokenizer of org/name" in capsys.readouterr().err
    monkeypatch.setattr(huggingface_hub, "snapshot_download", real)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert model_folder("org/name", weights=False) == folder
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE forbids"):
        model_folder("org/name")
    put(cache, starter_folder(), starter_files())
    assert model_folder("org/name", weights=False) == model_folder("org/name") == folder
