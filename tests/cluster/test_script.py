"""Scripts of one's own: `andon run`, torchrun, save and load, Ctrl-C, halts; the examples of the repository."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from andon.checkpoint.disk.manifest import verify
from andon.numerics import AVX2
from tests import ROOT
from tests.kit.runs import andon, ctrl_c, environment, finish, start, workers_of

EXAMPLES = ROOT / "examples"
SEED = int(os.environ.get("ANDON_SOAK_SEED", "1"))
COUNT = int(os.environ.get("ANDON_SOAK_COUNT") or "20")


def run(cwd: Path, workers: int, script: str | Path, *arguments: str) -> str:
    """What a script that succeeds prints on rank 0."""
    code, output = andon("run", f"--workers={workers}", str(EXAMPLES / script), *arguments, cwd=cwd)
    assert code == 0, output
    return output


def digest(output: str) -> str:
    found = re.findall(r"weights ([0-9a-f]{64})", output)
    assert len(found) == 1, output
    return str(found[0])


@pytest.mark.parametrize(("example", "arguments"), [("cnn.py", ["8"]), ("lora.py", []), ("resume.py", ["here", "20"])])
def test_every_example_gives_the_same_bits_on_one_two_and_three_workers(
    tmp_path: Path, example: str, arguments: list[str]
) -> None:
    found = set()
    for workers in (1, 2, 3):
        (tmp_path / str(workers)).mkdir()
        found.add(digest(run(tmp_path / str(workers), workers, example, *arguments)))
    assert len(found) == 1


def test_andon_stop_ends_a_script(tmp_path: Path) -> None:
    process = start("run", "--workers=2", str(EXAMPLES / "resume.py"), "run", "1000000", cwd=tmp_path)
    wait_for_checkpoint(tmp_path / "run", process)
    code, output = andon("stop", "run", cwd=tmp_path)
    assert code == 0 and "run stopped. The same command resumes it" in output, output
    assert finish(process) and process.returncode == 4


def test_ctrl_c_saves_and_exits_with_4_and_other_workers_go_on_to_the_undisturbed_digest(tmp_path: Path) -> None:
    whole = digest(run(tmp_path, 1, "resume.py", "whole", "60"))
    process = start("run", "--workers=2", str(EXAMPLES / "resume.py"), "run", "60", cwd=tmp_path)
    wait_for_checkpoint(tmp_path / "run", process)
    ctrl_c(process)
    output = finish(process)
    if process.returncode == 0:  # it was faster
        assert digest(output) == whole
        return
    assert process.returncode == 4 and "which is saved in" in output, output
    again = run(tmp_path, 3, "resume.py", "run", "60")
    assert "continuing with step" in again
    assert digest(again) == whole


def wait_for_checkpoint(folder: Path, process: subprocess.Popen[str], deadline: float = 60) -> None:
    until = time.monotonic() + deadline
    while not list(folder.glob("checkpoints/checkpoint-*")) and process.poll() is None:
        assert time.monotonic() < until
        time.sleep(0.01)


def kill_and_go_on(cwd: Path, rounds: int, steps: str, longest: float) -> str:
    """Run the example again and again, killed with -9 at random moments, and then to its end; its last output."""
    draw = random.Random(SEED)
    for _ in range(rounds):
        process = start("run", "--workers=2", str(EXAMPLES / "resume.py"), "run", steps, cwd=cwd)
        time.sleep(draw.uniform(0.1, longest))
        victims = [process.pid] if draw.random() < 0.3 else [each.pid for each in workers_of(process)[:1]]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        finish(process)
    return run(cwd, 3, "resume.py", "run", steps)


def test_kill_9_and_the_same_command_again_end_with_the_undisturbed_digest(tmp_path: Path) -> None:
    whole = digest(run(tmp_path, 1, "resume.py", "whole", "150"))
    assert digest(kill_and_go_on(tmp_path, 2, "150", longest=1.0)) == whole


@pytest.mark.soak
def test_kill_9_at_many_random_moments(tmp_path: Path) -> None:
    whole = digest(run(tmp_path, 1, "resume.py", "whole", "400"))
    assert digest(kill_and_go_on(tmp_path, COUNT, "400", longest=3.0)) == whole


BAD = """
import torch, andon
group = andon.init()
model = andon.DataParallel(torch.nn.Linear(3, 1), group, slots=4)
optimizer = andon.AdamW(model)
for slot in model.slots:
    x = torch.full((1, 3), float("nan") if slot == 3 else 1.0)
    model.backward(model(x).sum(), count=1)
optimizer.step()
"""


def test_a_halt_exits_with_3_names_the_rank_and_keeps_the_last_committed_step(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(BAD)
    code, output = andon("run", "--workers=2", "bad.py", cwd=tmp_path)
    assert code == 3 and "halted at step 1: rank 1 computed a bad gradient" in output, output
    bad = (
        (EXAMPLES / "resume.py").read_text().replace("x = torch.randn(32, 64)", "x = torch.randn(32, 64) / (6 - step)")
    )
    (tmp_path / "bad.py").write_text(bad)
    code, output = andon("run", "--workers=2", "bad.py", "run", "20", cwd=tmp_path)
    assert code == 3 and "halted at step 7" in output, output
    verify(tmp_path / "run" / "checkpoints" / "checkpoint-6")


def test_an_error_of_the_script_exits_with_1_and_names_the_rank_and_its_log(tmp_path: Path) -> None:
    """Though the other one, which fails because of it, ends first."""
    slow = "import atexit, os, time\natexit.register(time.sleep, int(os.environ['ANDON_RANK']))\n"
    text = f"{slow}import andon\ngroup = andon.init()\nif group.rank:\n    raise KeyError('gone')\ngroup.barrier()\n"
    (tmp_path / "bad.py").write_text(text)
    code, output = andon("run", "--workers=2", "bad.py", cwd=tmp_path)
    assert code == 1 and "Rank 1 ended bad.py with exit code 1" in output and "KeyError: 'gone'" in output, output
    assert "KeyError" in (tmp_path / "runs" / "bad" / "logs" / "rank-1.log").read_text()


def test_the_exit_code_of_a_script_is_that_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "seven.py").write_text("import sys, andon\nandon.init().close()\nsys.exit(7)\n")
    code, output = andon("run", "--workers=2", "seven.py", cwd=tmp_path)
    assert code == 7 and "ended seven.py with exit code 7" in output, output


def test_a_script_that_is_killed_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    code, output = andon("run", "--workers=1", "dies.py", cwd=tmp_path)
    assert code == 1 and "killed by SIGKILL" in output, output


def test_under_plain_python_ctrl_c_saves_and_mistakes_are_three_lines(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "resume.py"), "run", "100000"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    wait_for_checkpoint(tmp_path / "run", process)
    ctrl_c(process)
    process.send_signal(signal.SIGTERM)  # as torchrun does
    output = finish(process)
    assert process.returncode == 4 and "which is saved in" in output, output
    other = (
        (EXAMPLES / "resume.py").read_text().replace("model = andon", "net.double().float().bfloat16(); model = andon")
    )
    (tmp_path / "other.py").write_text(other)
    done = subprocess.run(
        [sys.executable, "other.py", "run", "9"],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
    )
    what, cause, remedy = done.stderr.strip().splitlines()
    assert done.returncode == 1 and "does not fit this model" in what and "float32, not torch.bfloat16" in cause, done
    assert remedy == "Use the model it was saved with, or another folder"


def test_a_script_that_is_not_there_is_named(tmp_path: Path) -> None:
    code, output = andon("run", "none.py", cwd=tmp_path)
    assert code == 1 and "none.py is not a file" in output


def test_another_script_cannot_use_the_folder_at_the_same_time_or_go_on_with_another_model(tmp_path: Path) -> None:
    run(tmp_path, 1, "resume.py", "run", "10")
    text = (EXAMPLES / "resume.py").read_text().replace("slots=6", "slots=3")
    (tmp_path / "other.py").write_text(text)
    code, output = andon("run", "other.py", "run", "20", cwd=tmp_path)
    assert code == 1 and "slots 6 → 3" in output, output


SWEEP = """
import os, sys, time, torch, andon
group = andon.init()
me, other = sys.argv[1:]
model = andon.DataParallel(torch.nn.Linear(3, 1), group, slots=2)
optimizer = andon.AdamW(model)
for step in model.steps(0, 3):
    for slot in model.slots:
        model.backward(model(torch.ones(1, 3)).sum(), count=1)
    optimizer.step()
    print("this is", me, flush=True)
    open(me, "w").close()
    while not os.path.exists(other):
        time.sleep(0.05)
"""


def test_two_runs_of_one_script_at_the_same_time_have_logs_and_ledgers_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "sweep.py").write_text(SWEEP)
    first, second = (start("run", "--workers=2", "sweep.py", *names, cwd=tmp_path) for names in ("ab", "ba"))
    outputs = {finish(process) for process in (first, second)}
    assert (first.returncode, second.returncode) == (0, 0), outputs
    told = "Another run of sweep.py uses runs/sweep: the logs and the ledger of this one are in runs/sweep-2"
    assert sum(told in output for output in outputs) == 1, outputs
    folders = [tmp_path / "runs" / name for name in ("sweep", "sweep-2")]
    assert {(folder / "logs" / "rank-1.log").read_text() for folder in folders} == {
        "this is a\n" * 3,
        "this is b\n" * 3,
    }
    for folder in folders:
        lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines if "step" in line] == [1, 2, 3]
    assert "Another run" not in run(tmp_path, 2, tmp_path / "sweep.py", "a", "b"), "the first folder is free again"


def test_ctrl_c_ends_a_script_that_never_saves(tmp_path: Path) -> None:
    process = start("run", "--workers=2", str(EXAMPLES / "cnn.py"), "100000", cwd=tmp_path)
    time.sleep(3)
    ctrl_c(process)
    output = finish(process)
    assert process.returncode == 4 and "Nothing was saved" in output, output


def test_a_last_save_that_fails_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("in the way")
    code, output = andon("run", "--workers=2", str(EXAMPLES / "resume.py"), "run", "10", cwd=tmp_path)
    assert code == 1 and "could not be written" in output, output


@pytest.mark.skipif("avx2" not in Path("/proc/cpuinfo").read_text(), reason="there is one kind of kernels")
def test_a_script_uses_the_kernels_that_the_launcher_was_given(tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text(
        "import torch, andon\n"
        "group = andon.init()\n"
        "x = torch.full((16, 2), 1 + 2**-12)\n"
        "fused = (x @ (x * torch.tensor([-1.0, 1.0])).T).any().item()\n"
        "print(torch.backends.cpu.get_cpu_capability(), fused)\n"
        "group.close()\n"
    )
    environ = {name: value for name, value in environment(tmp_path).items() if name not in AVX2}
    fastest = "AVX512" if "avx512f" in Path("/proc/cpuinfo").read_text() else "AVX2"
    for numerics, expected in (("", "AVX2 True"), ("compatible", "AVX2 False"), ("native", f"{fastest} True")):
        options = [f"--numerics={numerics}"] if numerics else []
        command = [sys.executable, "-m", "andon", "run", *options, "show.py"]
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=100)
        assert done.stdout.strip() == expected and "numerics" not in done.stderr, done
    environ["ANDON_NUMERICS"] = "best"
    done = subprocess.run([sys.executable, "show.py"], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert "Settings: portable, compatible, native" in done.stderr, done
