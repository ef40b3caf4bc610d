"""Following the directory of a run, which a user may move or remove during the run."""

import os
from pathlib import Path

from isobit.util.errors import StorageError

_REMOVED = " (deleted)"


class DirectoryWatch:
    """Holds a run's directory, and says where it is now.

    The directory is held open, and Linux says where it is now.  Open files move with it; what is
    opened by its path would be created at the old place.
    """

    def __init__(self) -> None:
        self._root = Path()
        self._descriptor: int | None = None
        self._name: str | None = None  # the kernel's name for it at first

    def hold(self, root: Path) -> None:
        """Keep the directory open until ``release``.  Raises OSError."""
        self.release()
        self._root = root
        self._descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        self._name = self._name_now()

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None

    def now(self) -> Path | None:
        """The directory's path, perhaps a new one; None where it was removed."""
        if self._descriptor is None:
            return self._root
        name = self._name_now()
        if name is None or name == self._name:
            return self._root if _is_there(Path(name or self._root)) else None
        return None if name.endswith(_REMOVED) else Path(name)

    def check(self) -> None:
        """Raise StorageError, saying what happened, where it was moved or removed."""
        place = self.now()
        if place == self._root:
            return
        if place is None:
            raise StorageError(
                f"the run's directory {self._root} was removed while the run went on: its metrics, "
                "completions and checkpoints are lost"
            )
        raise StorageError(
            f"the run's directory {self._root} was moved to {place} while the run went on; put it "
            f"back, or go on there (--output {place} --resume)"
        )

    def _name_now(self) -> str | None:
        """The kernel's name for the directory; None where the system does not say it."""
        try:
            return os.readlink(f"/proc/self/fd/{self._descriptor}")
        except OSError:
            return None


def _is_there(path: Path) -> bool:
    """Whether a path exists, as far as the disk answers."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True
