"""Who may ask: clients that send one of the operator's keys.

One idea: the key is looked at before anything else of the request is read, and comparing takes as long for a wrong key
as for a right one, whichever of several it is.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from stageline.server.errors import ApiError, error_response

# Load balancers and process managers ask these, without keys. A browser opens the dashboard, which holds no data, and
# sends the key when it asks for some. What / names, everybody can know.
OPEN_PATHS = frozenset({"/", "/health", "/ping", "/dashboard"})
_SCHEME = b"bearer "


class RequireKey:
    """Middleware: lets requests through that send `Authorization: Bearer KEY` with one of `keys`."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or path_of(scope) in OPEN_PATHS or self._is_known(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "this key is not one of the server's; send one that is, as `Authorization: Bearer KEY`"
            if _sent_key(scope)
            else "a key is needed: send it as `Authorization: Bearer KEY`",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error_response(error)(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        sent = _sent_key(scope)
        if sent is None:
            return False
        digest = _digest(sent)
        # Every key is compared, whichever matches.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches)


def _sent_key(scope: Scope) -> bytes | None:
    """What stands behind `Bearer`; None if there is no such header."""
    sent: bytes = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    return sent[len(_SCHEME) :].strip() if sent[: len(_SCHEME)].lower() == _SCHEME else None


def path_of(scope: Scope) -> str:
    """The request's path below the server's root path."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(root) :] if root and path.startswith(root + "/") else path


def _digest(key: bytes) -> bytes:
    """Equal lengths, so that comparing tells nothing of a key's length."""
    return hashlib.sha256(key).digest()
