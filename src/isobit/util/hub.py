"""What the Hugging Face hub does not give, as an error that names it and says what to do."""

from collections.abc import Iterator
from contextlib import contextmanager

from isobit.util.errors import IsobitError, shown


@contextmanager
def hub_errors(
    kind: type[IsobitError],
    known: str,
    unknown: str,
    failed: str,
    remedy: str,
    revision: str | None,
) -> Iterator[None]:
    """A block in which something is asked of the hub: its errors become those of a ``kind``.

    Each begins with one of the texts: the hub has it, but not that ``revision`` (``known``); has
    no such thing (``unknown``); or could not be asked (``failed``), for which there is a
    ``remedy`` beside the network.
    """
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        yield
    except IsobitError:
        raise
    except RevisionNotFoundError:
        raise kind(
            f"{known}, but no revision {revision}; name a branch, a tag or a commit of it"
        ) from None
    except RepositoryNotFoundError:  # gated ones too
        raise kind(
            f"{unknown}, or none that you may read; check the name, accept its terms on its page, "
            "and set HF_TOKEN where it is private"
        ) from None
    except Exception as error:  # the library raises many types, down to those of its HTTP client
        reason = str(error).strip().splitlines()
        raise kind(
            f"{failed}: {type(error).__name__}: {shown(reason[0] if reason else '')}; check the "
            f"network, or {remedy}"
        ) from error
