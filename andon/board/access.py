"""Who may see the board: on 127.0.0.1 and ::1 every user of this machine, elsewhere those who know the run's token.

Pages of other sites cannot read the board. On loopback the name in `Host` must be one of this machine's, which stops
DNS rebinding; elsewhere the cookie is never sent across sites. The token is typed into a form, or sent as
`Authorization: Bearer`. It is never part of a URL, because URLs end up in logs and histories.
"""

import asyncio
import hmac
from hashlib import sha256
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "andon_board"
LOOPBACK = {"localhost", "127.0.0.1", "::1"}
"""At these hosts the board needs no token, and answers no other name in `Host`."""
PUBLIC = {"/login", "/board.css"}
WRONG_TOKEN_SECONDS = 1.0
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard:
    """Passes a request to the app or refuses it; adds security headers to every answer."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self.app, self._token = app, token
        self._wrong_token = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        answer = self.app if self._may_pass(scope) else self._refuse(scope)
        await answer(scope, receive, send_with_headers)

    def _may_pass(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        if self._token is None:
            return host_of(headers.get("host", "")) in LOOPBACK
        if scope["path"] in PUBLIC:
            return True
        sent = headers.get("authorization", "").removeprefix("Bearer ").strip()
        cookie = Request(scope).cookies.get(COOKIE, "")
        return _equal(sent, self._token) or _equal(cookie, self._proof())

    def _refuse(self, scope: Scope) -> Response:
        if self._token is None:
            return PlainTextResponse("This board answers only requests for localhost.\n", 421)
        if scope["path"] == "/":
            return RedirectResponse("/login", 303)
        return PlainTextResponse("The run's token is needed.\n", 401, {"WWW-Authenticate": "Bearer"})

    def _proof(self) -> str:
        """The value of the cookie: it proves knowledge of the token without containing it."""
        assert self._token
        return hmac.new(self._token.encode(), b"andon board", sha256).hexdigest()

    async def log_in(self, request: Request) -> Response:
        """Answer the form: set the cookie if the token is right; wrong tokens wait, one after the other."""
        sent = await _token_in_form(request)
        if self._token is None or not _equal(sent, self._token):
            async with self._wrong_token:
                await asyncio.sleep(WRONG_TOKEN_SECONDS)
            return RedirectResponse("/login?wrong", 303)
        response = RedirectResponse("/", 303)
        secure = request.url.scheme == "https"
        response.set_cookie(COOKIE, self._proof(), httponly=True, samesite="strict", secure=secure)
        return response


async def _token_in_form(request: Request) -> str:
    """The token in a form; empty if the form is too large."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > 4096:
            return ""
    return parse_qs(body.decode("latin-1")).get("token", [""])[0].strip()


def _equal(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())


def host_of(header: str) -> str:
    """The name in a `Host` header, without the port."""
    return header[1:].partition("]")[0] if header.startswith("[") else header.partition(":")[0].lower()
