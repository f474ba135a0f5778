"""The board in a real browser: live, stopped by the cord, killed and resumed, finished, hostile, long.

The soak version watches the demo and takes the pictures that the README shows (docs/images).
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from playwright.sync_api import Browser, Page, Route

from tests import ROOT
from tests.board.browser import chromium, page_of, until
from tests.board.test_board import TOKEN, begin, board, event, step, write
from tests.kit.runs import SMALL, events, start, wait_for_step, workers_of

IMAGES = ROOT / "docs" / "images"
HOSTILE = "<script>document.title='x'</script>\"'&\x1b[31m\u202eevil\x00"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


def lamps(page: Page) -> list[str]:
    return [item.get_attribute("class") or "" for item in page.locator("#lamps li").all()]


def points(page: Page) -> int:
    return int(page.locator("#loss-chart").get_attribute("data-points") or 0)


def curve(page: Page) -> list[float]:
    """The steps of the curve that is drawn."""
    until(page, "document.querySelector('#loss-chart').dataset.points > 0")
    (run,) = page.evaluate("fetch('/api/runs').then(answer => answer.json())")
    found: list[float] = page.evaluate(f"fetch('/api/runs/{run['key']}').then(answer => answer.json())")["curve"][
        "step"
    ]
    return found


def kill(process: Any) -> None:
    """As if the machine had lost power: launcher and workers at once."""
    everyone = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for each in everyone:
        each.send_signal(signal.SIGKILL)
    process.wait(30)


AT_HOME = """folder => {
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) texts.currentNode.data = texts.currentNode.data.replaceAll(folder, "/home/you");
}"""
"""Show a folder as the home of whoever reads the README."""


def watch(browser: Browser, run: Path, options: list[str], steps: tuple[int, ...], images: Path | None) -> None:
    """A run that loses a worker at one step and goes on, is killed at another, resumed, and halted by a NaN; then seen
    once more, finished."""

    def picture(page: Page, name: str) -> None:
        if images:
            page.wait_for_timeout(1500)
            page.evaluate(AT_HOME, str(run.parent.parent))
            page.screenshot(path=images / f"{name}.png")

    lost, killed, halted, last = steps
    # A small run would be over before the page is open: it pauses while it is watched, and where it will be killed.
    pauses = {} if images else {**dict.fromkeys(range(lost // 2, killed - 1, 8), 1), killed: 15}
    slow = [f"--fault=stall:rank=0,step={step},seconds={seconds}" for step, seconds in pauses.items()]
    folder = run.parent
    command = ["train", *options, f"--run.dir={run}", f"--train.steps={last}", "--workers=2"]
    process = start(*command, *slow, cwd=folder)
    wait_for_step(run, lost // 2 - 1, process, 600)
    with board(run, "--bind=127.0.0.1:0") as url:
        with page_of(browser, url) as page:
            page.wait_for_selector("#lamps .running")
            before = points(page)
            until(page, f"document.querySelector('#loss-chart').dataset.points > {before}")
            assert lamps(page) == ["running", "running"] and page.locator("#halt").is_hidden()
            wait_for_step(run, lost, process, 600)
            workers_of(process)[1].kill()
            see_the_return(page, run)
            wait_for_step(run, killed - 1, process, 600)
            picture(page, "live")
            kill(process)
            process = start(*command, f"--fault=nan:rank=1,step={halted}", cwd=folder)
            page.wait_for_selector("#lamps .cord", timeout=900_000)
            assert lamps(page) == ["stopped", "cord"]
            assert "Rank 1: pulled the cord." in (page.locator("#spoken").text_content() or "")
            card = page.locator("#halt").inner_text()
            (halt,) = events(run, "halt")
            sample = halt["findings"][0]["samples"][0]
            assert f"at step {halted}" in card and halt["findings"][0]["parameter"] in card and str(sample) in card
            assert halt["texts"][str(sample)].split()[2] in card and "andon data show" in card
            assert page.locator("#lanes rect.done").count() == 5  # the lost one; both before and after the kill
            assert "resumed after step" in page.locator("#generations").inner_text()
            seen = curve(page)
            assert seen == sorted(set(seen)) and "done again" in page.locator("#loss-legend").inner_text()
            picture(page, "halt")
        process.wait(60)
        process = start(*command, "--eval.every=0", cwd=folder)
        assert process.wait(900) == 0
        with page_of(browser, url, "dark") as page:
            page.wait_for_selector("#lamps .done")
            assert page.locator("#state").inner_text().startswith("Done") and curve(page)[-1] == last
            picture(page, "finished")
        if images:
            with page_of(browser, url, width=390) as page:
                page.wait_for_selector("#lamps .done")
                picture(page, "phone")


def see_the_return(page: Page, run: Path) -> None:
    """A worker was killed: its lane has a gap, the generations tell of it, both lamps burn again, the curve is one."""
    until(page, "document.querySelector('#generations').textContent.includes('1 joined')", 120)
    told = page.locator("#generations").inner_text()
    assert "2 workers · rank 1 was lost" in told.replace("\n", " ") or "1 worker · rank 1 was lost" in told
    until(page, "document.querySelectorAll('#lamps .running').length === 2")
    (left,) = events(run, "lost")
    lane = page.locator("#lanes rect.open").count(), page.locator("#lanes rect.lost").count()
    assert left["rank"] == 1 and lane == (2, 1)
    seen = curve(page)
    assert seen == sorted(set(seen))


def test_a_run_is_seen_live_without_a_worker_resumed_halted_and_finished(browser: Browser, tmp_path: Path) -> None:
    options = [*SMALL, "--checkpoint.every=10", "--eval.every=20", "--data.stories=200"]
    watch(browser, tmp_path / "run", options, (30, 60, 85, 100), None)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_pictures_of_the_readme(browser: Browser, tmp_path: Path) -> None:
    IMAGES.mkdir(exist_ok=True)
    (tmp_path / "runs").mkdir()
    watch(
        browser, tmp_path / "runs" / "demo", ["--checkpoint.every=100", "--eval.every=50"], (200, 330, 480, 700), IMAGES
    )


def test_what_a_run_says_is_shown_as_text_and_nobody_else_is_asked(browser: Browser, tmp_path: Path) -> None:
    name = "<img src=x onerror=alert(1)>\u202egnp"
    finding = {"rank": 0, "host": HOSTILE, "kind": HOSTILE, "samples": [1], "slot": 0, "parameter": HOSTILE, "count": 1}
    halt = event("halt", step=3, committed=2, cause=HOSTILE, findings=[finding], sound=True, texts={"1": HOSTILE})
    worker = event("worker", rank=0, host=HOSTILE)
    told = [event("sample", step=1, text=HOSTILE), event("note", text=HOSTILE)]
    failed = event("save_failed", step=2, reason=HOSTILE, folder=HOSTILE, again=False)
    write(tmp_path / name, [*begin(workers=1), worker, step(1), *told, failed, step(2), halt])
    with board(tmp_path, "--bind=127.0.0.1:0") as url, page_of(browser, url) as page:
        page.on("dialog", lambda dialog: pytest.fail(dialog.message))
        page.wait_for_selector("#halt:not([hidden])")
        assert page.locator("h1").inner_text() == name.replace("\u202e", r"\u202e")
        shown = HOSTILE.replace("\x1b", r"\x1b").replace("\u202e", r"\u202e").replace("\x00", r"\x00")
        for place in ("#samples", "#notes", "#halt", "#saves"):
            assert shown in page.locator(place).inner_text()
        assert page.title() != "x" and page.locator("img").count() == 0
        assert page.locator("script").count() == 2  # those of the page


@contextmanager
def timed(page: AbstractContextManager[Page]) -> Iterator[tuple[Page, float]]:
    began = time.monotonic()
    with page as opened:
        yield opened, began


def renderers() -> list[psutil.Process]:
    """The processes of this browser that hold pages."""
    return [each for each in psutil.Process().children(recursive=True) if "--type=renderer" in each.cmdline()]


def test_a_million_steps_of_eight_workers_open_at_once(browser: Browser, tmp_path: Path) -> None:
    """Short: a tenth of that; with ANDON_SOAK_COUNT as many thousand steps as it says."""
    count = 1000 * int(os.environ.get("ANDON_SOAK_COUNT") or 100)
    times = {name: [61.5] * 8 for name in ("forward", "backward", "fingerprint", "exchange", "optimizer", "save")}
    line = json.dumps(step(10**7 - 1, 1.234567890123456, rank_ms=times)).replace(f"{10**7 - 1}", "%d")
    with open(write(tmp_path / "run", begin(workers=8)) / "metrics.jsonl", "a") as file:
        file.writelines(line % number + "\n" for number in range(1, count + 1))
    with board(tmp_path, "--bind=127.0.0.1:0") as url, timed(page_of(browser, url)) as (page, began):
        until(page, "document.querySelector('#loss-chart').dataset.points > 100")
        took = time.monotonic() - began
        page.wait_for_timeout(1000)
        held = max(each.memory_full_info().uss for each in renderers())
        print(f"{count:,} steps opened in {took:.2f} s; the browser's process of the page holds {held / 1e6:.0f} MB")
        assert len(lamps(page)) == 8 and held < 200e6 and took < 1.5 + 10 * (os.getloadavg()[0] > 2)


def test_the_page_works_by_keyboard_and_tells_a_screen_reader_what_it_shows(browser: Browser, tmp_path: Path) -> None:
    for name in ("one", "two"):
        write(tmp_path / name, [*begin(), *(step(n) for n in range(1, 301)), event("done", 40, step=300, samples=[])])
    with board(tmp_path, "--bind=127.0.0.1:0") as url, page_of(browser, url) as page:
        page.wait_for_selector(".run")
        page.keyboard.press("Digit2")
        until(page, "document.querySelector('h1').textContent === 'two'")
        page.keyboard.press("Shift+Digit1")
        until(page, "document.querySelector('#loss-legend').textContent.includes('one')")
        page.locator("#loss-chart").focus()
        for _ in range(3):
            page.keyboard.press("ArrowLeft")
        assert "step 297" in page.locator("#loss-legend").inner_text()
        assert (page.locator("#spoken").text_content() or "").startswith("step 297: training 0.003")
        page.keyboard.press("+")
        page.wait_for_selector("#reset:not([hidden])")
        page.keyboard.press("Escape")
        page.wait_for_selector("#reset", state="hidden")
        page.keyboard.press("t")
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        label = page.locator("#loss-chart").get_attribute("aria-label") or ""
        assert "Training loss from 1 at step 1 to 0.003333 at step 300" in label
        shown = "[...document.querySelectorAll('button, [role=img]')].filter(each => each.offsetParent)"
        unnamed = page.evaluate(f"{shown}.filter(each => !each.textContent.trim() && !each.ariaLabel).length")
        assert unnamed == 0
        page.locator("summary").click()
        until(page, "document.querySelectorAll('#loss-table tr').length > 20")


def test_the_run_that_was_chosen_last_is_shown_whichever_answer_comes_last(browser: Browser, tmp_path: Path) -> None:
    held: list[Route] = []
    for name, after in (("one", 0), ("two", 0), ("three", 900)):
        write(tmp_path / name, [*begin(), *(step(n) for n in range(1, 301)), event("done", 40 + after, step=300)])
    with board(tmp_path, "--bind=127.0.0.1:0") as url, page_of(browser, url) as page:
        heading = "document.querySelector('h1').textContent"
        until(page, f"{heading} === 'three'")
        keys = {run["name"]: run["key"] for run in page.evaluate("fetch('/api/runs').then(answer => answer.json())")}
        order = sorted(keys)
        page.route(f"**/api/runs/{keys['one']}", lambda route: held.append(route))
        page.keyboard.press(f"Digit{order.index('one') + 1}")
        page.keyboard.press(f"Digit{order.index('two') + 1}")
        until(page, f"{heading} === 'two'")
        with page.expect_response(lambda answer: answer.url.endswith(keys["one"])) as answered:
            held.pop().continue_()
        answered.value.finished()
        assert page.evaluate(heading) == "two" and page.evaluate("location.hash") == f"#{keys['two']}"
        page.route("**/curve?*", lambda route: held.append(route))
        page.locator("#loss-chart").focus()
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("+")
        page.keyboard.press(f"Digit{order.index('three') + 1}")
        until(page, f"{heading} === 'three'")
        before = points(page)
        with page.expect_response(lambda answer: "/curve?" in answer.url) as answered:
            held.pop().continue_()
        answered.value.finished()
        page.keyboard.press("t")  # it draws all again
        assert points(page) == before == 300 and page.locator("#reset").is_hidden()


def test_a_run_before_its_first_step_does_not_show_the_curves_of_another_one(browser: Browser, tmp_path: Path) -> None:
    write(tmp_path / "begins", begin())
    write(tmp_path / "trains", [*begin(after=9), *(step(n) for n in range(1, 31))])
    with board(tmp_path, "--bind=127.0.0.1:0") as url, page_of(browser, url) as page:
        page.wait_for_selector("#loss-chart canvas")
        page.locator(".run button", has_text="begins").first.click()
        page.wait_for_selector("#loss-chart", state="hidden")
        assert page.locator("#c-lr").is_hidden()
        write(tmp_path / "begins", [step(1), step(2)], "a")
        page.wait_for_selector("#loss-chart canvas")
        until(page, "document.querySelector('#loss-chart').dataset.points == 2")


def test_runs_that_begin_and_end_are_listed_without_loading_the_page_again(browser: Browser, tmp_path: Path) -> None:
    write(tmp_path / "one", [*begin(), step(1)])
    write(tmp_path / "two", [*begin(after=9), step(200)])
    with board(tmp_path, "--bind=127.0.0.1:0") as url, page_of(browser, url) as page:
        script = page.evaluate("fetch('/board.js').then(answer => answer.text())")
        faster = script.replace("RUNS_MILLISECONDS = 10_000", "RUNS_MILLISECONDS = 100")
        assert faster != script
        page.route("**/board.js", lambda route: route.fulfill(body=faster, content_type="text/javascript"))
        page.reload()
        page.locator(".run button", has_text="one").focus()
        write(tmp_path / "one", [event("done", 40, step=1)], "a")
        write(tmp_path / "three", [*begin(), step(1)])
        until(page, "document.querySelectorAll('.run').length === 3 && document.querySelector('.run.done')")
        assert page.evaluate("document.activeElement.textContent") == "one"


def test_a_wrong_token_is_called_that(browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANDON_TOKEN", TOKEN)
    write(tmp_path / "run", [*begin(), step(1)])
    with board(tmp_path, "--bind=127.0.0.2:0") as url, page_of(browser, url) as page:
        assert page.locator("#wrong").is_hidden()
        page.locator("#token").fill("a wrong token")
        page.keyboard.press("Enter")
        page.wait_for_selector("#wrong:not([hidden])")
        assert page.locator("#wrong").inner_text() == "This is not the token of the run."
        page.locator("#token").fill(TOKEN)
        page.keyboard.press("Enter")
        page.wait_for_selector("#lamps li")
