"""A real browser for the tests of the board: the system's chromium, driven by playwright; without it tests skip."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, Error, Page, sync_playwright


@contextmanager
def chromium() -> Iterator[Browser]:
    """The system's browser."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not path:
        pytest.skip("there is no chromium")
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except Error as error:
            pytest.skip(f"chromium does not start: {error}")
        yield browser
        browser.close()


@contextmanager
def page_of(browser: Browser, url: str, scheme: str = "light", width: int = 1440) -> Iterator[Page]:
    """A page that asks nobody but its own server, and whose scripts do not fail."""
    problems: list[str] = []
    asked: set[str] = set()
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
    page.set_default_timeout(30_000)
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: asked.add(request.url))
    page.goto(url)
    yield page
    page.close()
    assert not problems, problems
    assert all(each.startswith((url, "data:")) for each in asked), asked


def until(page: Page, expression: str, seconds: float = 30.0) -> None:
    """Wait until an expression holds in the page (playwright's own wait needs a page that may eval)."""
    deadline = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, f"{expression} does not hold after {seconds} s"
        page.wait_for_timeout(30)
