"""The terminal: foreign text does no harm there, and a run goes on without it."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from andon.commands.generate import generate
from andon.config.load import load
from andon.errors import UserError, harmless
from andon.run.records.events import event
from andon.run.screen.display import Display, show_error
from andon.run.screen.terminal import Terminal
from tests.kit.runs import SMALL, andon, environment, events, start, summary, train


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


EVIL = "\x1b]0;evil\x07\x1b[31m\x9b\r\x7f\udcff[red]:smile:"
SPELLED_OUT = r"\x1b]0;evil\x07\x1b[31m\x9b\x0d\x7f\udcff[red]:smile:"
FOUND = {"rank": 1, "slot": 0, "kind": "NaN", "count": 1, "first": 0, "samples": [1], "unit": EVIL}
DONE = {"step": 1, "tokens": 1, "loss": 1.0, "validation_loss": 1.0, "weights_blake3": "00"}
SHOWN: dict[str, dict[str, Any]] = {
    "note": {"text": EVIL},
    "sample": {"text": EVIL},
    "save_failed": {"step": 1, "again": True, "folder": EVIL, "reason": EVIL},
    "halt": {
        **{"cause": EVIL, "step": 2, "committed": 1, "sound": True},
        "findings": [{**FOUND, "host": EVIL, "parameter": EVIL}, {**FOUND, "host": EVIL, "slot": None}],
    },
    "done": {**DONE, "samples": [EVIL]},
}


def test_newline_and_tab_stay() -> None:
    assert harmless(f"one\n\ttwo{EVIL}") == f"one\n\ttwo{SPELLED_OUT}"


def is_harmless(text: str) -> bool:
    return harmless(text) == text and SPELLED_OUT[:20] in text


@pytest.mark.parametrize("kind", SHOWN)
def test_events_show_control_characters_harmlessly(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    Display(Terminal(), load(None))(event(kind, **SHOWN[kind]))
    assert is_harmless(capsys.readouterr().out)


def test_a_step_shows_its_mfu_where_it_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    known = {"step": 1, "loss": 2.0, "tokens_per_s": 10.0, "lr": 0.1, "grad_norm": 1.0}
    Display(Terminal(), load(None))(event("step", **known, mfu=0.421))
    assert "MFU 42.1%" in capsys.readouterr().out


def test_a_note_changes_nothing_of_what_is_shown_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", output := Screen())
    console = Terminal()
    display = Display(console, load(None))
    known = {"step": 1, "loss": 2.0, "tokens_per_s": 10.0, "lr": 0.1, "grad_norm": 1.0}
    for each in (
        event("start", step=0, floor=None),
        event("step", **known),
        event("sample", step=1, text="word " * 99),
    ):
        display(each)
    assert display._live
    display._live.refresh()
    output.truncate(0)
    display(event("lost", text="[red]Rank 1 was lost[/]"))
    console.print("Saving", style="yellow")
    display.close()
    shown = output.getvalue()
    assert "[red]Rank 1" in shown and "[bold]" not in shown and shown.count("word") == 3 * 99
    assert "\x1b[33mSaving\x1b[0m\n\x1b[1mstep" in shown.replace("\r", ""), shown


def test_errors_show_control_characters_harmlessly(capsys: pytest.CaptureFixture[str]) -> None:
    show_error(Terminal(stderr=True), UserError(EVIL, EVIL, EVIL))
    assert capsys.readouterr().err == f"{SPELLED_OUT}\n" * 3


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that somebody else has trained on text that means harm, with a cache of their own."""
    folder = tmp_path_factory.mktemp("foreign")
    (folder / "text.txt").write_text("\x1b]0;evil\x07 and more of it.\n" * 200)
    options = ["text.txt", "--data.tokenizer=bytes", "--data.cache=their-cache", "--train.steps=2"]
    train(*options, cwd=folder)
    (folder / "their-cache").rename(folder / "gone")
    return folder


def contents(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


def test_a_foreign_run_is_looked_at_and_not_written_to(foreign: Path) -> None:
    before = contents(foreign / "run")
    stale = foreign / "their-cache" / ".tmp-0-1-0"
    stale.mkdir(parents=True)
    os.utime(stale, (0, 0))  # so old that whoever uses the cache would remove it
    code, output = andon("data", "show", "run", "--windows=0", cwd=foreign)
    assert code == 0 and r"\x1b]0;evil\x07 and" in output and "\x1b" not in output, output
    code, output = andon("evaluate", "run/checkpoints/checkpoint-2", "--windows=2", cwd=foreign)
    assert code == 0 and "validation loss" in output, output
    assert contents(foreign / "run") == before
    assert list((foreign / "their-cache").iterdir()) == [stale] and (foreign / "cache" / "andon").is_dir()


def test_a_run_without_events_is_named(foreign: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text((foreign / "run" / "config.yaml").read_text())
    code, output = andon("data", "show", str(tmp_path), "--windows=0", cwd=foreign)
    assert code == 1 and "metrics.jsonl cannot be read" in output and "Traceback" not in output, output


def test_generated_text_is_raw_only_where_no_terminal_obeys_it(foreign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = foreign / "run" / "checkpoints" / "checkpoint-2"
    options: dict[str, Any] = {"count": 1, "length": 1, "temperature": 0.0, "seed": 0}
    for output, prompt in ((Screen(), r"\x1b[31m"), (io.StringIO(), "\x1b[31m")):
        monkeypatch.setattr(sys, "stdout", output)
        generate(folder, "\x1b[31m", **options)
        assert output.getvalue().startswith(prompt)


def test_a_temperature_too_small_for_f32_takes_the_likeliest_token(foreign: Path) -> None:
    command = ["generate", "run/checkpoints/checkpoint-2", "and", "--length=12"]
    coldest = andon(*command, "--temperature=0", cwd=foreign)
    assert coldest[0] == 0
    for temperature in ("1e-320", "1e-40", "1e-28"):
        assert andon(*command, f"--temperature={temperature}", cwd=foreign) == coldest


def test_a_run_goes_on_when_nothing_can_be_shown(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        process = start("train", *SMALL, "--run.dir=run", "--workers=2", cwd=tmp_path, output=full)
        assert process.wait(timeout=90) == 0
    assert summary(tmp_path / "run")["step"] == 6
    notes = [said["text"] for said in events(tmp_path / "run", "note")]
    assert "Nothing is shown from here on: No space left on device. Training continues" in notes


def test_a_command_whose_output_cannot_be_written_fails(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "andon", "config", "show"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment(tmp_path), stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 3, done.stderr
    assert "No space left on device" in done.stderr
