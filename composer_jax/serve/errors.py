"""ApiError: a refused request, in the form of OpenAI's API."""

from typing import Any

CONTEXT_LENGTH = "context_length_exceeded"
"""The code by which clients know that a conversation has to become shorter."""


class ApiError(Exception):
    """One sentence for the client: what is wrong with its request, and what to send instead."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message, self.status, self.code, self.param = message, status, code, param

    def body(self) -> dict[str, Any]:
        """Returns the JSON of the answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
