"""The recording of a terminal that the README shows; the soak version makes it from a real demo (docs/images)."""

from __future__ import annotations

import json
import pty
import re
import sys
import time
from codecs import getincrementaldecoder
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from xml.etree import ElementTree

import pytest

from tests import ROOT
from tests.commands.recording import Frame, Screen, render
from tests.kit.runs import events_so_far, launch, read_bytes, summary, workers_of

IMAGE = ROOT / "docs" / "images" / "terminal.svg"
COLUMNS, ROWS = 100, 32
PLAYED, EVERY, LAST = 24.0, 0.5, 7.0  # seconds of the recording, between frames, and of the last one
CAPTION, CAPTION_SECONDS = "in another terminal:  $ pkill -9 andon-rank-1", 3.5
KILL_AT = 260


def shown(screen: Screen) -> list[str]:
    return ["".join(character for character, _ in line) for line in screen.visible()]


def test_the_screen_follows_what_rich_writes() -> None:
    screen = Screen(8, 3)
    screen.feed("one\r\n\x1b[1;31mtwo\x1b[0m\r\n\x1b[?25l")
    assert shown(screen) == ["one", "two", ""] and screen.visible()[1][0][1].bold
    screen.feed("\x1b[1A\x1b[2Kthree\r\x1b[1A\x1b[38;5;196mONE\x1b[K\r\n\nlonger than that")
    assert shown(screen) == ["three", "longer t", "han that"]
    picture = render([Frame(0.0, screen.visible()), Frame(1.0, screen.visible(), "<elsewhere>")], 2.0, 8, 3, "a & b")
    assert ElementTree.fromstring(picture).tag.endswith("svg") and "&lt;elsewhere&gt;" in picture
    assert not re.search(r"(href|src|url\()=?\"?http", picture)  # asks nobody when it is seen


def _at_home(found: re.Match[str]) -> str:
    """The path as a reader has it; within a panel the right edge stays where it is."""
    path = f"/home/you{found[1]}"
    return path + (found[2].rjust(len(found[0]) - len(path)) if found[2] else "")


def frames_of(cast: list[tuple[float, str]], killed: float) -> list[Frame]:
    """What was seen, in the time of the recording, PLAYED seconds in all."""
    speed, screen, frames = cast[-1][0] / PLAYED, Screen(COLUMNS, ROWS), list[Frame]()
    for number, (moment, text) in enumerate(cast):
        screen.feed(text)
        at, caption = moment / speed, CAPTION if killed <= moment < killed + CAPTION_SECONDS * speed else ""
        is_due = not frames or at - frames[-1].moment > EVERY or number + 1 == len(cast)
        if is_due and (not frames or (screen.visible(), caption) != (frames[-1].lines, frames[-1].caption)):
            frames.append(Frame(at, screen.visible(), caption))
    return frames


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_recording_of_the_readme(tmp_path: Path) -> None:
    """The demo, one of whose workers is killed: the other goes on, and the number is the same."""
    folder = Path(mkdtemp(prefix="andon-"))  # a short path, so that no line is broken by it
    reader, writer = pty.openpty()
    size = {"COLUMNS": str(COLUMNS), "LINES": str(ROWS), "TERM": "xterm-256color"}
    with open(writer, "w") as terminal:
        command = [sys.executable, "-m", "andon", "demo"]
        process = launch(command, folder, executed=True, output=terminal, more=size)
    cast, killed = [(0.0, "\x1b[32m$\x1b[0m andon demo\r\n")], 0.0
    began, run = time.monotonic(), folder / "runs" / "demo"
    decode = getincrementaldecoder("utf-8")().decode  # a read may end within a character
    while (found := read_bytes(reader)) or process.poll() is None:
        cast.append((time.monotonic() - began, re.sub(rf"{folder}(\S*)( +│)?", _at_home, decode(found))))
        if not killed and any(event["step"] >= KILL_AT for event in events_so_far(run)[-1:]):
            workers_of(process)[1].kill()
            killed = time.monotonic() - began
    (tmp_path / "cast.json").write_text(json.dumps([killed, cast]))
    assert process.returncode == 0 and summary(run)["weights_blake3"].startswith("6d56a8e8a73bc110")
    frames = frames_of(cast, killed)
    rmtree(folder)
    title = "andon demo, with the time shortened: one of its two workers is killed"
    IMAGE.write_text(render(frames, PLAYED + LAST, COLUMNS, ROWS, title))
    print(f"{len(frames)} frames, {IMAGE.stat().st_size:,} bytes, {cast[-1][0]:.0f} s")
