"""Answers to what went wrong, in OpenAI's form."""

from typing import Any

from isobit.serve.engine import EngineStoppedError, PausedError
from isobit.util.errors import DataError, IsobitError, RequestError


class ApiError(Exception):
    """An answer other than 200, in OpenAI's form."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        """``param`` is the key of the request that is wrong, ``code`` OpenAI's word for the error,
        ``retry_after`` the seconds to wait.
        """
        super().__init__(message)
        self.status, self.message, self.retry_after = status, message, retry_after
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.body = {"message": message, "type": kind, "param": param, "code": code}

    def json(self) -> dict[str, Any]:
        return {"error": self.body}


def as_api_error(error: ApiError | IsobitError) -> ApiError:
    """The answer to an error of ours: whose fault it is, and whether to try again."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError | DataError):
        return ApiError(400, str(error))
    if isinstance(error, EngineStoppedError | PausedError):
        return ApiError(503, f"{error}; try again", retry_after=5)
    return ApiError(500, str(error))
