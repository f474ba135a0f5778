"""The board's routes: the page, a run's state, its curve between two steps, and server-sent events with news."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from hashlib import sha256
from importlib.resources import files
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from andon.board.access import Guard
from andon.board.feed import Feed, glance
from andon.board.history import runs_in
from andon.board.prometheus import exposition

log = logging.getLogger(__name__)
TICK_SECONDS = 1.0  # between two deltas
PING_SECONDS = 15.0  # without a delta, after which a stream sends a comment to stay open
FILES = ("board.css", "uplot.css", "uplot.js", "charts.js", "panels.js", "board.js")
PAGE = {"/": "index.html", "/login": "login.html", **{f"/{name}": name for name in FILES}}
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}


class Board:
    """The runs in some folders. A run is read when a viewer opens it."""

    def __init__(self, folders: list[Path]) -> None:
        self._folders = folders
        self._feeds: dict[str, Feed] = {}
        self._opening = asyncio.Lock()
        self._expecting: asyncio.Future[None] | None = None
        self._viewers: dict[str, int] = {}
        self._news: dict[str, asyncio.Event] = {}
        self._tickers: dict[str, asyncio.Task[None]] = {}

    def runs(self) -> dict[str, Path]:
        """Every run, by its key."""
        return {sha256(str(run.resolve()).encode()).hexdigest()[:12]: run for run in runs_in(self._folders)}

    async def feed(self, key: str) -> Feed | None:
        """The feed of a run, opened at its first use; None if there is no such run."""
        async with self._opening:
            if key not in self._feeds:
                folder = (await asyncio.to_thread(self.runs)).get(key)
                if folder is None:
                    return None
                self._feeds[key] = await asyncio.to_thread(Feed, folder, key)
        return self._feeds[key]

    def expect(self) -> None:
        """Open the newest run in the background, because a browser loads the page that will show it."""

        async def open_newest() -> None:
            runs = await asyncio.to_thread(self.runs)
            with contextlib.suppress(OSError, ValueError):  # the run was removed, or there is none
                await self.feed(max(runs, key=lambda key: (runs[key] / "metrics.jsonl").stat().st_mtime))

        self._expecting = asyncio.ensure_future(open_newest())

    @contextlib.asynccontextmanager
    async def watching(self, feed: Feed) -> AsyncIterator[None]:
        """Read a run once a second while it has viewers, however many."""
        key = feed.key
        self._viewers[key] = self._viewers.get(key, 0) + 1
        self._news.setdefault(key, asyncio.Event())
        if key not in self._tickers:
            self._tickers[key] = asyncio.create_task(self._tick(feed))
        try:
            yield
        finally:
            self._viewers[key] -= 1
            if not self._viewers[key]:
                self._tickers.pop(key).cancel()

    async def _tick(self, feed: Feed) -> None:
        known = feed.edition, feed.number
        while True:
            await asyncio.sleep(TICK_SECONDS)
            try:
                await asyncio.to_thread(feed.advance)
            except Exception:  # viewers wait for what follows
                log.exception("%s could not be read to its end", feed.folder)
            if known != (now := (feed.edition, feed.number)):  # a viewer that opened the run may have read on, too
                known = now
                event, self._news[feed.key] = self._news[feed.key], asyncio.Event()
                event.set()

    async def deltas(self, feed: Feed, cursor: str) -> AsyncGenerator[str]:
        """Server-sent events: each delta after the cursor, as soon as it exists."""
        async with self.watching(feed):
            while True:
                news = self._news[feed.key]
                missed = await asyncio.to_thread(feed.since, cursor)
                if missed is None:
                    yield "event: reload\ndata: {}\n\n"
                    return
                for cursor, text in missed:
                    yield f"id: {cursor}\ndata: {text}\n\n"
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(news.wait(), PING_SECONDS)
                    continue
                yield ": alive\n\n"


def make_app(folders: list[Path], token: str | None) -> ASGIApp:
    """The board of the runs in some folders; without a token, for this machine only."""
    board = Board(folders)
    page = files("andon.board") / "page"

    async def static(request: Request) -> Response:
        name = PAGE[request.url.path]
        data = (page / name).read_bytes()
        if name == "index.html":
            board.expect()
        elif name == "login.html" and "wrong" in request.query_params:
            data = data.replace(b" hidden>", b">")
        return Response(data, media_type=TYPES[Path(name).suffix])

    async def feed_of(request: Request) -> Feed:
        feed = await board.feed(request.path_params["run"])
        if feed is None:
            raise HTTPException(404, "There is no such run\n")
        return feed

    async def runs(request: Request) -> Response:
        found = await asyncio.to_thread(board.runs)
        return JSONResponse(await asyncio.to_thread(lambda: [glance(run, key) for key, run in found.items()]))

    async def state(request: Request) -> Response:
        feed = await feed_of(request)
        return Response(await asyncio.to_thread(feed.everything), media_type="application/json")

    async def curve(request: Request) -> Response:
        feed = await feed_of(request)
        try:
            first, last = (float(request.query_params[name]) for name in ("from", "to"))
            points = min(4000, max(2, int(request.query_params.get("points", 900))))
        except (KeyError, ValueError):
            return PlainTextResponse("from and to must be steps\n", 400)
        return JSONResponse(await asyncio.to_thread(feed.curve, first, last, points))

    async def stream(request: Request) -> Response:
        feed = await feed_of(request)
        cursor = request.headers.get("last-event-id") or request.query_params.get("after", "")
        return StreamingResponse(board.deltas(feed, cursor), media_type="text/event-stream")

    async def metrics(request: Request) -> Response:
        feeds = [await board.feed(key) for key in await asyncio.to_thread(board.runs)]
        text = await asyncio.to_thread(exposition, [feed for feed in feeds if feed])
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    routes = [
        *(Route(path, static) for path in PAGE),
        Route("/api/runs", runs),
        Route("/api/runs/{run}", state),
        Route("/api/runs/{run}/curve", curve),
        Route("/api/runs/{run}/stream", stream),
        Route("/metrics", metrics),
    ]
    app = Starlette(routes=routes)
    guard = Guard(app, token)
    app.router.routes.append(Route("/login", guard.log_in, methods=["POST"]))
    return guard
