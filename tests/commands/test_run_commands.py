"""Commands about runs: status, stop, plot, the halt on one screen, the newest checkpoint, help and presets."""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from andon.config.load import keys, load
from andon.run.screen.ending import resuming_command
from tests.board.test_board import begin, event, step, write
from tests.kit.group_harness import busy
from tests.kit.runs import SMALL, andon, events, finish, start, summary, train, wait_for_step


def test_a_running_run_is_listed_and_stopped_as_by_ctrl_c(tmp_path: Path) -> None:
    process = start("train", *SMALL, "--train.steps=100000", "--run.dir=runs/one", cwd=tmp_path)
    wait_for_step(tmp_path / "runs" / "one", 3, process)
    write(tmp_path / "runs" / "two", [*begin(), step(1), event("done", step=1, samples=[])])
    code, output = andon("status", "--json", cwd=tmp_path)
    one, two = map(json.loads, output.splitlines())
    assert code == 0 and (one["state"], one["pid"] is not None) == ("running", True) and one["step"] >= 3
    assert (two["state"], two["pid"], two["step"]) == ("done", None, 1)
    assert "runs/one" in andon("status", cwd=tmp_path)[1]
    code, output = andon("stop", "runs/one", cwd=tmp_path)
    assert code == 0 and "stopped at step" in output, output
    finish(process)
    assert process.returncode == 4
    for command in (("stop", "runs/one"), ("resize", "runs/one", "2")):
        code, output = andon(*command, cwd=tmp_path)
        assert code == 1 and "o process" in output and "holds its lock" in output and len(output.splitlines()) == 3


def test_a_run_whose_process_has_died_has_ended(tmp_path: Path) -> None:
    write(tmp_path / "one", [*begin(), step(1) | {"time": time.time()}])
    (tmp_path / "one" / ".lock").write_text(f"{os.getpid()} as if an earlier process had had this id")

    def state() -> str:
        found: str = json.loads(andon("status", "one", "--json", cwd=tmp_path)[1])["state"]
        return found

    assert state() == "ended"
    with open(tmp_path / "one" / ".lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (tmp_path / "one" / ".lock").write_text("of another machine")
        assert state() == "running"


def test_a_folder_without_a_configuration_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for command in (["resize", "mine", "2"], ["audit", "mine"], ["data", "show", "mine", "--windows=0"]):
        code, output = andon(*command, cwd=tmp_path)
        assert code == 1 and "mine has no configuration of a run\nIt has no config.yaml: a script's run" in output, (
            output
        )
    assert "There is no such folder" in andon("audit", "nowhere", cwd=tmp_path)[1]
    assert "There is no such folder" in andon("checkpoint", "ls", "nowhere", cwd=tmp_path)[1]
    (tmp_path / "mine" / ".lock").touch()
    assert "The run has not saved yet" in andon("checkpoint", "ls", "mine", cwd=tmp_path)[1]


def test_resize_lets_another_worker_join_a_coordinators_run(tmp_path: Path) -> None:
    options = ["--workers=1", "--train.steps=100000", "--checkpoint.every=0", "--eval.every=0", "--run.dir=run"]
    process = start("coordinator", *SMALL, *options, "--bind=127.0.0.1:0", cwd=tmp_path)
    assert process.stdout
    while not (found := re.search(r"andon (worker \S+ --token-file \S+)", line := process.stdout.readline())):
        assert line, "the coordinator ended"
    first = start(*found[1].split(), cwd=tmp_path)
    wait_for_step(tmp_path / "run", 1, first)
    assert andon("resize", "run", "2", cwd=tmp_path)[0] == 0
    wait_for_event(tmp_path / "run", "note", "wants 2 workers")
    second = start(*found[1].split(), cwd=tmp_path)
    wait_for_event(tmp_path / "run", "generation", "'workers': 2")
    assert andon("resize", "run", "1", cwd=tmp_path)[0] == 0
    wait_for_event(tmp_path / "run", "generation", "'workers': 1")
    process.terminate()
    assert [finish(each) and each.returncode for each in (process, first, second)] == [4, 4, 0]


def wait_for_event(folder: Path, kind: str, text: str) -> None:
    """Wait until a run has recorded an event that contains a text."""
    until = time.monotonic() + 60 * busy()
    while not any(text in str(each) for each in events(folder, kind)):
        assert time.monotonic() < until, text
        time.sleep(0.01)


def test_a_curve_is_drawn_in_the_terminal_and_as_a_png(tmp_path: Path) -> None:
    from PIL import Image

    evals = [event("eval", step=100, loss=0.5)]
    write(tmp_path / "run", [*begin(), *(step(n) for n in range(1, 301)), *evals])
    code, output = andon("plot", "run", cwd=tmp_path)
    assert code == 0 and "run · loss" in output and any("\u2801" <= character <= "\u28ff" for character in output)
    assert andon("plot", "run", "-o", "loss.png", cwd=tmp_path)[0] == 0
    with Image.open(tmp_path / "loss.png") as image:
        assert image.size == (1200, 600) and np.asarray(image).std() > 5
    for arguments in (["run", "--curve=nothing"], ["."], ["run", "-o", "loss.jpg"]):
        assert andon("plot", *arguments, cwd=tmp_path)[0] == 1


def test_a_halt_fits_one_screen_and_the_command_to_try_has_no_fault(tmp_path: Path) -> None:
    options = ["--fault", "nan:rank=1,step=3", "--resume", "none"]
    code, output = andon("train", *SMALL, "--workers=2", *options, "--run.dir=run", cwd=tmp_path)
    card = output[output.index("THE LINE STOPPED") :]
    assert code == 3 and len(card.splitlines()) <= 16
    findings = json.loads((tmp_path / "run" / "halt.json").read_text())["findings"]
    assert f"{len(findings)} parameters, first {findings[0]['parameter']}" in card and "halt.json" in card
    assert "andon data show" in card and "andon train --model.vocab=300" in card and "--fault" not in card
    assert "--resume" not in card
    assert resuming_command(["train", "--fault", "a", "x y", "--fault=b"]) == "andon train 'x y'"
    assert resuming_command(["train", "--resume=none", "--resume", "b"], saved=False) == "andon train --resume b"


def test_a_skipped_step_is_said_at_once_and_at_the_end(tmp_path: Path) -> None:
    options = ["--on_nonfinite=skip", "--fault=nan:rank=0,step=3", "--run.dir=run"]
    code, output = andon("train", *SMALL, *options, cwd=tmp_path)
    assert code == 0 and "step 3 skipped, no weight changed: rank 0 computed a bad gradient" in output
    assert "1 step changed no weight" in output and "documents" in output and "epochs" in output
    found = summary(tmp_path / "run")
    assert found["skipped"] == 1 and found["seconds"] > 0 and found["tokens_per_s"] > 0 and found["peak_memory"] > 1e7


def test_a_finished_run_stays_as_it_is_when_its_command_is_given_again(tmp_path: Path) -> None:
    train("--train.steps=2", cwd=tmp_path)
    before = (tmp_path / "run" / "summary.json").read_bytes()
    command = ["train", *SMALL, "--run.dir=run", "--train.steps=2"]
    for name in (command, ["coordinator", *command[1:]]):
        code, output = andon(*name, "--workers=2", cwd=tmp_path)
        assert code == 0 and "run is done: all 2 steps" in output and "andon evaluate" in output, output
    assert (tmp_path / "run" / "summary.json").read_bytes() == before
    assert andon(*command, "--model.hidden=64", cwd=tmp_path)[0] == 1


def test_generate_takes_the_newest_good_checkpoint_of_a_run(tmp_path: Path) -> None:
    train("--checkpoint.every=3", cwd=tmp_path)
    checkpoints = tmp_path / "run" / "checkpoints"
    asked = ["--length=4", "--temperature=0"]
    whole = andon("generate", "run", "Once", *asked, cwd=tmp_path)
    assert whole == andon("generate", "run/checkpoints/checkpoint-6", "Once", *asked, cwd=tmp_path) and whole[0] == 0
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoints / "checkpoint-6")
    assert tokenizer.pad_token == tokenizer.eos_token == "<|endoftext|>"
    with open(checkpoints / "checkpoint-6" / "model.safetensors", "r+b") as file:
        file.seek(1000)
        file.write(b"\xff\xff")
    code, output = andon("generate", "run", "Once", *asked, cwd=tmp_path)
    assert code == 0 and "andon checkpoint verify run/checkpoints/checkpoint-6" in output
    _, listed = andon("checkpoint", "ls", "run", "--verify", "--json", cwd=tmp_path)
    rows = [json.loads(line) for line in listed.splitlines()]
    assert [(row["step"], row["verdict"]) for row in rows] == [(3, "good"), (6, "damaged")]


def test_the_configuration_is_shown_with_the_help_of_each_key_and_reads_back(tmp_path: Path) -> None:
    code, output = andon("config", "show", "--workers=2", cwd=tmp_path)
    assert code == 0 and all(" ".join(text.split()) in output for text in keys().values())
    (tmp_path / "shown.yaml").write_text(output)
    wanted = load(None, {"workers": 2, "data.cache": str(tmp_path / "cache" / "andon")})
    assert load(tmp_path / "shown.yaml") == wanted
    assert yaml.safe_load(output) == json.loads(andon("config", "show", "--workers=2", "--json", cwd=tmp_path)[1])
    assert all(f"--{key}" in andon("train", "--help", cwd=tmp_path)[1] for key in ("workers", "train.steps", "run.dir"))
    assert "124m" in andon("config", "presets", cwd=tmp_path)[1]


def test_a_run_on_a_terminal_has_a_board_until_it_ends(tmp_path: Path) -> None:
    import pty
    import re
    import urllib.request

    from tests.kit import runs

    reader, writer = pty.openpty()
    with open(writer, "w") as terminal:
        process = start(
            "train", *SMALL, "--train.steps=10000", "--run.dir=run", cwd=tmp_path, executed=True, output=terminal
        )
    text = ""
    until = time.monotonic() + 60 * busy()
    while not (found := re.search(r"http://127\.0\.0\.1:\d+/", text)) and time.monotonic() < until:
        text += runs.read_terminal(reader)
    assert found, text
    with urllib.request.urlopen(found[0], timeout=30) as answer:
        assert b"Andon" in answer.read()
    runs.ctrl_c(process)
    while process.poll() is None and time.monotonic() < until:
        runs.read_terminal(reader)
    with pytest.raises(OSError):
        urllib.request.urlopen(found[0], timeout=5)
