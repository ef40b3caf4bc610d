"""Errors of the Hugging Face hub that name what was asked for and say what to do."""

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
    """Turn errors of the hub within the block into errors of ``kind``.

    Each begins with one of the texts: ``known`` if only the ``revision`` is missing, ``unknown`` if
    the hub has no such repository, or ``failed`` if it could not be asked, for which ``remedy`` is
    advice besides checking the network.
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
