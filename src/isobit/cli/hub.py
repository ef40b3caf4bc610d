"""Upload of an exported model to the Hugging Face hub."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from isobit.util.errors import ConfigError, shown

if TYPE_CHECKING:
    from huggingface_hub import HfApi

    from isobit.commands.export import ExportResult, ExportSource


HUB = "hf:"
"""What a target begins with that is a model of the hub."""
_REPOSITORY = re.compile(r"hf://(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)", re.ASCII)


@dataclass(frozen=True, slots=True)
class HubTarget:
    """A model of the hub that a folder is uploaded to, made and checked before it is written."""

    name: str
    api: "HfApi"

    @classmethod
    def open(cls, target: str, private: bool, overwrite: bool) -> "HubTarget":
        """The repository ``hf://user/name``, created if there is none.  Raises ConfigError for
        another form, without a token, for a model that has files already unless ``overwrite``, and
        where the hub refuses or cannot be reached.
        """
        from huggingface_hub import HfApi, get_token

        match = _REPOSITORY.fullmatch(target)
        if match is None:
            raise ConfigError(f"--to is {target!r}; a model of the hub is written hf://user/name")
        if get_token() is None:
            raise ConfigError(
                f"--to is {target!r}, but there is no token of the hub here: run `hf auth login`, "
                "or set HF_TOKEN to one that may write"
            )
        repository = cls(match["name"], HfApi())
        with repository.errors("cannot be opened"):
            repository.api.create_repo(repository.name, private=private or None, exist_ok=True)
            files = set(repository.api.list_repo_files(repository.name)) - {
                ".gitattributes",
                "README.md",
            }
        if files and not overwrite:
            raise ConfigError(
                f"--to is {target!r}, which already holds {len(files)} files; name another model, "
                "or replace it (--overwrite)"
            )
        return repository

    def upload(self, folder: Path, message: str) -> str:
        """Upload a folder as one commit, replacing older weights.  -> Its address."""
        with self.errors("did not take the folder"):
            commit = self.api.upload_folder(
                repo_id=self.name,
                folder_path=folder,
                commit_message=message,
                delete_patterns=["*.safetensors", "*.safetensors.index.json"],
            )
        return str(commit.repo_url)

    @contextmanager
    def errors(self, what: str) -> Iterator[None]:
        """Turn every error of the hub into a ConfigError that says what to do."""
        from huggingface_hub.errors import HfHubHTTPError

        try:
            yield
        except Exception as error:  # many types, down to those of its HTTP client
            status = None
            if isinstance(error, HfHubHTTPError) and error.response is not None:
                status = error.response.status_code
            lines = str(error).strip().splitlines() or [""]
            remedy = (
                "the token is not one that may write there; make one that may, and set HF_TOKEN or "
                "run `hf auth login`"
                if status in (401, 403)
                else "check the name on the hub"
                if status in (400, 404, 409)
                else "check the network; the model can also be exported to a folder (--to FOLDER) "
                "and uploaded later with `hf upload`"
            )
            raise ConfigError(
                f"hf://{self.name} {what}: {type(error).__name__}: {shown(lines[0])}; {remedy}"
            ) from error


def export_to_hub(
    source: "ExportSource", target: HubTarget, **settings: Any
) -> tuple["ExportResult", str]:
    """``export`` to a temporary folder, and upload that.  -> Also the model's address."""
    from isobit.commands.export import export

    with TemporaryDirectory(prefix="isobit-export-") as temporary:
        folder = Path(temporary) / target.name.rpartition("/")[2]
        result = export(source, folder, **settings)
        step = "" if source.step is None else f" after step {source.step}"
        address = target.upload(folder, f"Upload {result.format} weights{step} by Isobit")
    return result, address
