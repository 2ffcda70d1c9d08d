"""Errors as the API's clients know them: a status, a JSON object `error`, and when to come back."""

from __future__ import annotations

import json
from collections.abc import Sequence

from starlette.responses import Response

LONGEST_MESSAGE = 600  # characters: a request's own values are shown in it
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
SECONDS_UNTIL_RETRY = {429: 1, 503: 2}


class Refusal(Exception):
    """A request that is not answered, and what its client is told.

    Args:
        status: of HTTP.
        message: one line; cut where it is long.
        param: the field that is wrong.
        code: a word for programs, such as "model_not_found".
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        text = " ".join(message.split())
        super().__init__(text if len(text) <= LONGEST_MESSAGE else f"{text[:LONGEST_MESSAGE]}...")
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict:
        """What the client reads: `{"error": {"message", "type", "param", "code"}}`."""
        usual = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": TYPES.get(self.status, usual), "param": self.param,
                          "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        seconds = SECONDS_UNTIL_RETRY.get(self.status)
        more = {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        return more if seconds is None else {**more, "Retry-After": str(seconds)}

    def response(self) -> Response:
        # In ASCII: half a surrogate pair from a request could not be encoded.
        return Response(json.dumps(self.body), self.status, self.headers, "application/json")


def wrong_value(error: Exception, names: Sequence[str] = (), renamed: dict[str, str] | None = None) -> Refusal:
    """The refusal for a `ValueError` or `TypeError` about an option, which its message names first.

    Args:
        names: those of the options, for the field `param`.
        renamed: our names of options that the API calls otherwise.
    """
    message = str(error)
    param = next((name for name in names if message.startswith((f"{name} ", f"{name}="))), None)
    for ours, theirs in (renamed or {}).items():
        message = message.replace(ours, theirs)
        param = theirs if param == ours else param
    return Refusal(400, message, param=param)
