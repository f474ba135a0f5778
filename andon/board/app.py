"""The board's answers: the page, a run's state, its curve between two steps, and what is new as server-sent events."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from hashlib import sha256
from importlib.resources import files
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from andon.board.access import Guard
from andon.board.feed import Feed, glance
from andon.board.prometheus import exposition

TICK = 1.0  # seconds between two deltas
PING = 15.0  # seconds after which a silent stream shows that it lives
PAGE = {
    "/": ("index.html", "text/html"),
    "/login": ("login.html", "text/html"),
    "/board.css": ("board.css", "text/css"),
    "/uplot.css": ("uplot.css", "text/css"),
    "/uplot.js": ("uplot.js", "text/javascript"),
    "/charts.js": ("charts.js", "text/javascript"),
    "/panels.js": ("panels.js", "text/javascript"),
    "/board.js": ("board.js", "text/javascript"),
}


class Board:
    """The runs below some folders, each read when someone looks at it."""

    def __init__(self, folders: list[Path]) -> None:
        self._folders = folders
        self._feeds: dict[str, Feed] = {}
        self._opening = asyncio.Lock()
        self._expecting: asyncio.Future[None] | None = None
        self._viewers: dict[str, int] = {}
        self._news: dict[str, asyncio.Event] = {}
        self._tickers: dict[str, asyncio.Task[None]] = {}

    def runs(self) -> dict[str, Path]:
        """Every run, by its key: the folders that were named, or the runs in them."""
        found: dict[str, Path] = {}
        for folder in self._folders:
            inside = [folder] if is_run(folder) else sorted(filter(is_run, folder.glob("*")))
            found |= {sha256(str(run.resolve()).encode()).hexdigest()[:12]: run for run in inside}
        return found

    async def feed(self, key: str) -> Feed | None:
        """The feed of a run, opened when it is first asked for."""
        async with self._opening:
            if key not in self._feeds:
                folder = (await asyncio.to_thread(self.runs)).get(key)
                if folder is None:
                    return None
                self._feeds[key] = await asyncio.to_thread(Feed, folder, key)
        return self._feeds[key]

    def expect(self) -> None:
        """Somebody loads the page: open the run that it will show, the newest, meanwhile."""

        async def open_newest() -> None:
            runs = await asyncio.to_thread(self.runs)
            with contextlib.suppress(OSError, ValueError):  # a run that was removed, or none
                await self.feed(max(runs, key=lambda key: (runs[key] / "metrics.jsonl").stat().st_mtime))

        self._expecting = asyncio.ensure_future(open_newest())

    @contextlib.asynccontextmanager
    async def watching(self, feed: Feed) -> AsyncIterator[None]:
        """Somebody looks at a run: it is read once a second, whatever their number."""
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
        while True:
            await asyncio.sleep(TICK)
            before = (feed.edition, feed.number)
            await asyncio.to_thread(feed.advance)
            if before != (feed.edition, feed.number):
                event, self._news[feed.key] = self._news[feed.key], asyncio.Event()
                event.set()

    async def deltas(self, feed: Feed, cursor: str) -> AsyncIterator[str]:
        """Server-sent events: each delta after the cursor, as soon as there is one."""
        async with self.watching(feed):
            while True:
                news = self._news[feed.key]
                missed = feed.since(cursor)
                if missed is None:
                    yield "event: reload\ndata: {}\n\n"
                    return
                for number, text in missed:
                    cursor = f"{feed.edition}.{number}"
                    yield f"id: {cursor}\ndata: {text}\n\n"
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(news.wait(), PING)
                    continue
                yield ": alive\n\n"


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run."""
    return (folder / "metrics.jsonl").is_file()


def make_app(folders: list[Path], token: str | None) -> ASGIApp:
    """The board of some folders; without a token for this machine only."""
    board = Board(folders)
    page = files("andon.board") / "page"

    async def static(request: Request) -> Response:
        name, kind = PAGE[request.url.path]
        if name == "index.html":
            board.expect()
        return Response((page / name).read_bytes(), media_type=kind)

    async def runs(request: Request) -> Response:
        found = await asyncio.to_thread(board.runs)
        return JSONResponse(await asyncio.to_thread(lambda: [glance(run, key) for key, run in found.items()]))

    async def state(request: Request) -> Response:
        feed = await board.feed(request.path_params["run"])
        if feed is None:
            return no_such_run()
        return Response(await asyncio.to_thread(feed.everything), media_type="application/json")

    async def curve(request: Request) -> Response:
        feed = await board.feed(request.path_params["run"])
        if feed is None:
            return no_such_run()
        try:
            first, last = (float(request.query_params[name]) for name in ("from", "to"))
            points = min(4000, max(2, int(request.query_params.get("points", 900))))
        except (KeyError, ValueError):
            return PlainTextResponse("from and to must be steps\n", 400)
        return JSONResponse(await asyncio.to_thread(feed.curve, first, last, points))

    async def stream(request: Request) -> Response:
        feed = await board.feed(request.path_params["run"])
        if feed is None:
            return no_such_run()
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


def no_such_run() -> Response:
    return PlainTextResponse("There is no such run\n", 404)
