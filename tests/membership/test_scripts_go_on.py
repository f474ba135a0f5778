"""Scripts of `andon run` that go on: workers die and come back, and the answer is that of the undisturbed script."""

from __future__ import annotations

import fcntl
import json
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.kit.runs import andon, finish, start, workers_of
from tests.membership.test_goes_on import wait_for

SCRIPT = """
import sys
import time
import torch
import torch.nn.functional as F
from torch import nn
import andon

group = andon.init(seed=1)
body = [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 4)]
model = andon.DataParallel(nn.Sequential(*body), group, slots=6)
optimizer = andon.AdamW(model, lr=1e-2, zero=sys.argv[2])
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.95)
start = andon.load("mine", model, optimizer, scheduler)
for step in model.steps(start, int(sys.argv[1])):
    for slot in model.slots:
        y = torch.randint(4, (16,))
        model.backward(F.cross_entropy(model(torch.randn(16, 8) + y[:, None]), y), count=16)
    optimizer.step(clip=1.0)
    scheduler.step()
    if step % 10 == 9:
        andon.save("mine", model, optimizer, step, scheduler)
    if group.rank == 0:
        print(step, file=open("steps", "a"))
    time.sleep(float(sys.argv[3]))
if group.rank == 0:
    print(andon.digest(model), file=open("digest", "w"))
group.close()
"""


DIES = """
import os
import threading
reached = threading.Event()
def die(place, step):
    if step >= WAITS_FOR:
        reached.set()
    if (place, step, group.rank) == FAULT and not os.path.exists("died"):
        reached.wait(60)
        open("died", "w").close()
        os.kill(os.getpid(), 9)
    if 0 < WAITS_FOR < step and group.rank == FAULT[2] and not os.path.exists("died"):
        time.sleep(60)
model.phases.on_enter = die
for step in model.steps"""


def script_that_dies(folder: Path, place: str, step: int, rank: int, waits_for: int = 0) -> None:
    """Write `SCRIPT` so that a rank kills itself, once, at a place of a step; a save first waits for a later step."""
    folder.mkdir(exist_ok=True)
    dies = DIES.replace("WAITS_FOR", str(waits_for)).replace("FAULT", repr((place, step, rank)))
    (folder / "mine.py").write_text(SCRIPT.replace("\nfor step in model.steps", dies))


def undisturbed_script(folder: Path, steps: int) -> None:
    """Run `SCRIPT` on one worker."""
    folder.mkdir()
    (folder / "mine.py").write_text(SCRIPT)
    code, output = andon("run", "--workers=1", "mine.py", str(steps), "even", "0", cwd=folder)
    assert code == 0, output


def assert_ended_alike(folder: Path, undisturbed: Path, steps: int) -> None:
    """Weights, buffers and the saved schedule are those of the undisturbed script."""
    assert (folder / "digest").read_text() == (undisturbed / "digest").read_text()
    saved, wanted = (
        json.loads((each / "mine" / "checkpoints" / f"checkpoint-{steps}" / "state.json").read_text())
        for each in (folder, undisturbed)
    )
    assert saved | {"world_size": 1} == wanted


@pytest.mark.parametrize("step", [22, 30])
def test_a_step_that_is_committed_when_a_worker_dies_counts_for_its_schedule_and_is_saved(
    tmp_path: Path, step: int
) -> None:
    alone, run = tmp_path / "alone", tmp_path / "run"
    undisturbed_script(alone, 30)
    # Rank 1 dies when all know the verdict: the others update, and miss it in the gather. It owns no weight here.
    script_that_dies(run, "optimizer", step, rank=1)
    code, output = andon("run", "--workers=3", "mine.py", "30", "even", "0", cwd=run)
    assert code == 0 and "was lost" in output and (run / "died").exists(), output
    assert (run / "steps").read_text() == (alone / "steps").read_text(), "no step is repeated"
    assert_ended_alike(run, alone, 30)


def test_a_forward_that_waits_for_the_weights_of_a_lost_worker_belongs_to_a_step_that_is_repeated(
    tmp_path: Path,
) -> None:
    alone, run = tmp_path / "alone", tmp_path / "run"
    undisturbed_script(alone, 30)
    script_that_dies(run, "optimizer", 22, rank=1)
    script = (run / "mine.py").read_text()
    (run / "mine.py").write_text(script.replace("slots=6", "slots=6, overlap_gather=True"))
    code, output = andon("run", "--workers=3", "mine.py", "30", "even", "0", cwd=run)
    assert code == 0 and "was lost" in output and (run / "died").exists(), output
    assert returns_in_ledger(run, 30) == [], "nobody has to go back"
    assert_ended_alike(run, alone, 30)


@pytest.mark.parametrize("rank", [1, 2])
def test_a_worker_that_dies_in_the_first_step_makes_no_checkpoint_of_the_first_weights(
    tmp_path: Path, rank: int
) -> None:
    """Rank 2 owns the state of all weights, which nobody needs before a step is committed."""
    alone, run = tmp_path / "alone", tmp_path / "run"
    undisturbed_script(alone, 20)
    script_that_dies(run, "exchange", 1, rank)
    code, output = andon("run", "--workers=3", "mine.py", "20", "even", "0", cwd=run)
    assert code == 0 and "was lost" in output, output
    assert min(saved_steps(run)) >= 10  # later, if the new worker joins then
    assert_ended_alike(run, alone, 20)


def test_the_ledger_of_a_script_goes_on_through_a_resume_and_a_return_to_a_checkpoint(tmp_path: Path) -> None:
    alone, run = tmp_path / "alone", tmp_path / "run"
    undisturbed_script(alone, 40)
    script_that_dies(run, "exchange", 26, rank=2)  # it owns the state of all weights
    for steps in ("20", "40"):
        code, output = andon("run", "--workers=3", "mine.py", steps, "even", "0", cwd=run)
        assert code == 0, output
    assert "was lost" in output
    assert_ended_alike(run, alone, 40)
    assert returns_in_ledger(run, 40) == [0, 20, 20], "the second start loads a checkpoint, and goes back to it"


LOADS = """
    if step in loads:
        loads.remove(step)
        if DIES and group.rank == 1:
            os.kill(os.getpid(), 9)
        andon.load("mine", model, optimizer, scheduler)
        continue
    if step % 10"""


@pytest.mark.parametrize("dies", [False, True])
def test_a_script_may_load_an_earlier_checkpoint_in_its_loop(tmp_path: Path, dies: bool) -> None:
    """Also when no step was done since the save, and when a worker dies instead of taking part in the load."""
    alone, run = tmp_path / "alone", tmp_path / "run"
    undisturbed_script(alone, 30)
    run.mkdir()
    script = SCRIPT.replace("\n    if step % 10", LOADS.replace("DIES", str(dies)))
    first = f"import os\nloads = set() if group.joins else {{25}} if {dies} else {{20, 25}}\nfor step in model.steps"
    (run / "mine.py").write_text(script.replace("for step in model.steps", first))
    code, output = andon("run", "--workers=2", "mine.py", "30", "off", "0.02", cwd=run)
    assert code == 0 and ("was lost" in output) == dies, output
    assert returns_in_ledger(run, 30) == ([20] if dies else [20, 20])
    assert_ended_alike(run, alone, 30)


def test_a_script_that_loads_when_a_step_has_no_loss_survives_the_loss_of_a_worker(tmp_path: Path) -> None:
    alone, run = tmp_path / "alone", tmp_path / "run"
    undisturbed_script(alone, 30)
    script_that_dies(run, "exchange", 15, rank=1)
    script = (run / "mine.py").read_text()
    loads = "totals = optimizer.step(clip=1.0)\n    if totals.loss != totals.loss:\n"
    loads += "        andon.load('mine', model, optimizer, scheduler)\n        continue\n"
    script = script.replace("optimizer.step(clip=1.0)\n", loads)
    saves = "andon.save('mine', model, optimizer, start - 1, scheduler)\nfor step in model.steps"
    (run / "mine.py").write_text(script.replace("for step in model.steps", saves))
    code, output = andon("run", "--workers=3", "mine.py", "30", "off", "0.05", cwd=run)
    assert code == 0 and output.count("is started again") == 1, output
    assert returns_in_ledger(run, 30) == []
    assert_ended_alike(run, alone, 30)


def test_the_ledger_of_a_script_goes_on_in_its_next_loop(tmp_path: Path) -> None:
    script = SCRIPT.replace("(start, int(sys.argv[1]))", "(first, 20)")
    begin, end = script.index("for step in model.steps"), script.index("if group.rank == 0:\n    print(andon.digest")
    body = script[begin:end].replace("\n", "\n    ") + "    if step == last:\n            break\n"
    loops = f"for first, last in ((0, 9), (10, 19)):\n    {body}"
    (tmp_path / "mine.py").write_text(script[:begin] + loops + script[end:])
    code, output = andon("run", "--workers=2", "mine.py", "20", "even", "0", cwd=tmp_path)
    assert code == 0, output
    assert returns_in_ledger(tmp_path, 18) == [], "the last two steps are reported by the steps after them"


EVALUATES = """
    if totals.gathered or not CAREFUL:
        model.eval()
        with torch.no_grad():
            value = model(torch.ones(16, 8)).sum().item()
        model.train()
        print(step, value, file=open(f"value-{os.getpid()}", "a"))
    if step % 10"""


@pytest.mark.parametrize(
    "place, overlap, careful",
    [("optimizer", False, False), ("optimizer", True, False), ("exchange", False, False), ("optimizer", False, True)],
)
def test_an_evaluation_uses_the_weights_after_its_step(
    tmp_path: Path, place: str, overlap: bool, careful: bool
) -> None:
    alone, run = tmp_path / "alone", tmp_path / "run"
    undisturbed_script(alone, 30)
    script_that_dies(run, place, 22, rank=1)  # in "optimizer" the others miss the weights of its update
    script = (run / "mine.py").read_text().replace("slots=6", f"slots=6, overlap_gather={overlap}")
    script = script.replace("optimizer.step(", "totals = optimizer.step(")
    (run / "mine.py").write_text(script.replace("\n    if step % 10", EVALUATES.replace("CAREFUL", str(careful))))
    code, output = andon("run", "--workers=3", "mine.py", "30", "even", "0", cwd=run)
    assert code == 0 and "was lost" in output, output
    values = {line for path in run.glob("value-*") for line in path.read_text().splitlines()}
    assert len(values) == 30 - careful, "every value of a step is the same one"
    assert returns_in_ledger(run, 30) in ([[]] if careful else [[10], [20]])
    assert_ended_alike(run, alone, 30)


@pytest.mark.parametrize("all_die", [False, True])
def test_a_script_does_not_go_on_without_its_state_if_there_is_no_checkpoint(tmp_path: Path, all_die: bool) -> None:
    script_that_dies(tmp_path / "run", "exchange", 5, rank=2)  # it owns the state of all weights
    if all_die:
        script = (tmp_path / "run" / "mine.py").read_text().replace("group.rank) == ", "2) == ")
        (tmp_path / "run" / "mine.py").write_text(script.replace('"died"', "f\"died-{os.environ['ANDON_RANK']}\""))
    code, output = andon("run", "--workers=3", "mine.py", "30", "even", "0.2", cwd=tmp_path / "run")
    assert code == 1 and "The run cannot go on" in output and "there is no checkpoint" in output, output
    assert not (tmp_path / "run" / "mine" / "checkpoints").exists() or not saved_steps(tmp_path / "run")


COMES_LATE = """
import atexit
import os
import time

def told() -> None:
    open("told", "w").close()
    time.sleep(2)

if os.path.exists("died-2") and os.environ["ANDON_RANK"] == "2":
    atexit.register(told)  # called when the worker has left the run
while os.path.exists("died-2") and os.environ["ANDON_RANK"] != "2" and not os.path.exists("told"):
    time.sleep(0.05)
"""


def test_the_error_is_that_of_the_worker_that_cannot_go_on_not_of_those_that_are_refused_then(tmp_path: Path) -> None:
    script_that_dies(tmp_path / "run", "exchange", 5, rank=2)
    script = (tmp_path / "run" / "mine.py").read_text().replace("group.rank) == ", "2) == ")
    script = script.replace('"died"', "f\"died-{os.environ['ANDON_RANK']}\"")
    (tmp_path / "run" / "mine.py").write_text(COMES_LATE + script)
    code, output = andon("run", "--workers=3", "mine.py", "30", "even", "0.2", cwd=tmp_path / "run")
    assert code == 1 and "was refused: the run ends" in output, output
    assert "Rank 2 ended mine.py with exit code 1" in output and "there is no checkpoint" in output, output


def test_a_worker_that_dies_in_the_save_of_the_last_step_does_not_end_the_run(tmp_path: Path) -> None:
    script_that_dies(tmp_path / "run", "write", 20, rank=0, waits_for=21)
    script = (tmp_path / "run" / "mine.py").read_text()
    # No step 21 comes: two seconds in which ranks that did not wait for the save would leave the loop.
    (tmp_path / "run" / "mine.py").write_text(script.replace("reached.wait(60)", "reached.wait(2)"))
    code, output = andon("run", "--workers=3", "mine.py", "20", "off", "0", cwd=tmp_path / "run")
    assert code == 0 and (tmp_path / "run" / "died").exists(), output
    assert saved_steps(tmp_path / "run") == [10, 20]
    assert (tmp_path / "run" / "steps").read_text().split() == [str(step) for step in range(20)], "no step is repeated"


def test_a_save_that_the_loss_of_a_worker_interrupts_is_made_afterwards(tmp_path: Path) -> None:
    run = tmp_path / "run"
    script_that_dies(run, "wrote", 10, rank=0, waits_for=12)  # step 11 is committed then
    code, output = andon("run", "--workers=3", "mine.py", "19", "off", "0", cwd=run)
    assert code == 0 and "was lost" in output, output
    assert saved_steps(run)[-1] > 10


def ledger_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of the ledger of `SCRIPT`."""
    return [json.loads(line) for line in (folder / "runs" / "mine" / "ledger.jsonl").read_text().splitlines()]


def returns_in_ledger(folder: Path, steps: int) -> list[int]:
    """The steps to which `SCRIPT` has gone back, if every other line of its ledger is the step that follows."""
    step, last, returns = 0, 0, []
    for line in ledger_of(folder):
        if "step" in line:
            assert line["step"] == step + 1
        assert line.get("back", 0) <= last, "a return to a step that the ledger does not have"
        last = max(last, line.get("step", 0))
        step = line.get("step", line.get("back", step))
        returns += [step] if "back" in line else []
    assert step == steps
    return returns


def saved_steps(folder: Path) -> list[int]:
    """The steps that a script has saved, in order."""
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in (folder / "mine" / "checkpoints").iterdir())


@pytest.mark.parametrize(("zero", "victim"), [("off", 0), ("even", 1)])
def test_a_script_survives_the_loss_of_a_worker(tmp_path: Path, zero: str, victim: int) -> None:
    alone, run = tmp_path / "alone", tmp_path / "run"
    for folder in (alone, run):
        folder.mkdir()
        (folder / "mine.py").write_text(SCRIPT)
    code, output = andon("run", "--workers=1", "mine.py", "150", zero, "0", cwd=alone)
    assert code == 0, output
    process = start("run", "--workers=3", "mine.py", "150", zero, "0.02", cwd=run)
    wait_for(process, lambda: (run / "steps").exists() and len((run / "steps").read_text().splitlines()) > 20)
    workers_of(process)[victim].kill()
    output = finish(process)
    assert process.returncode == 0 and "was lost" in output and "is started again" in output, output
    assert (run / "digest").read_text() == (alone / "digest").read_text()
    assert [len(line["hosts"]) for line in ledger_of(run) if "hosts" in line][0::2] in ([3, 3], [3])


def test_a_script_goes_on_when_the_worker_that_holds_its_folder_is_stopped(tmp_path: Path) -> None:
    alone, run = tmp_path / "alone", tmp_path / "run"
    undisturbed_script(alone, 30)
    script_that_dies(run, "exchange", 12, rank=0)
    script = (run / "mine.py").read_text()
    (run / "mine.py").write_text(script.replace("os.kill(os.getpid(), 9)", "os.kill(os.getpid(), 19)"))
    code, output = andon("run", "--workers=2", "mine.py", "30", "off", "0", cwd=run)
    assert code == 0 and "was lost" in output and "is started again" in output, output
    assert_ended_alike(run, alone, 30)


def test_a_script_that_cannot_go_on_while_it_saves_ends_at_once(tmp_path: Path) -> None:
    """Another process locks the folder as soon as the worker dies that has locked it."""
    run = tmp_path / "run"
    script_that_dies(run, "wrote", 10, rank=0, waits_for=12)  # rank 1 still waits for this save
    process = start("run", "--workers=2", "mine.py", "30", "off", "0", cwd=run)
    wait_for(process, (run / "mine" / ".lock").exists)
    with open(run / "mine" / ".lock") as lock:
        taken = threading.Thread(target=fcntl.flock, args=[lock, fcntl.LOCK_EX], daemon=True)
        taken.start()
        output = finish(process)
        taken.join()
    assert process.returncode == 1 and "is in use" in output, output


def test_a_worker_that_is_killed_after_the_last_step_is_an_error(tmp_path: Path) -> None:
    dies = "import os\nif group.rank == 1:\n    os.kill(os.getpid(), 9)\ngroup.close()\n"
    (tmp_path / "mine.py").write_text(SCRIPT.replace("group.close()\n", dies))
    code, output = andon("run", "--workers=3", "mine.py", "10", "off", "0", cwd=tmp_path)
    assert code == 1 and "A worker of mine.py was lost before its script had ended" in output, output


def test_a_halt_stays_a_halt_if_a_worker_is_killed_meanwhile(tmp_path: Path) -> None:
    loss = "F.cross_entropy(model(torch.randn(16, 8) + y[:, None]), y)"
    script = SCRIPT.replace(loss, f"{loss} * (float('nan') if step == 5 else 1)")
    dies = "import os\ndef step_or_die(clip):\n    try:\n        return optimizer.step(clip)\n"
    dies += "    except andon.JidokaHalt:\n        if group.rank == 1:\n            os.kill(os.getpid(), 9)\n"
    dies += "        raise\n"
    script = script.replace("optimizer.step(", "step_or_die(")
    (tmp_path / "mine.py").write_text(script.replace("start = andon.load", f"{dies}start = andon.load"))
    code, output = andon("run", "--workers=3", "mine.py", "10", "off", "0", cwd=tmp_path)
    assert code == 3, output


def test_the_last_line_of_a_failed_worker_is_shown_however_it_begins(tmp_path: Path) -> None:
    script = "import os, sys\nprint('one\\n  a line')\nsys.exit(int(os.environ['ANDON_RANK']))\n"
    (tmp_path / "mine.py").write_text(script)
    code, output = andon("run", "--workers=2", "mine.py", cwd=tmp_path)
    assert code == 1 and "a line" in output and "It wrote nothing" not in output, output


def test_a_script_may_leave_its_folder_before_it_begins(tmp_path: Path) -> None:
    leaves = "import os\nsys.argv[0] = 'other'\nos.makedirs('elsewhere', exist_ok=True)\nos.chdir('elsewhere')\n"
    (tmp_path / "mine.py").write_text(SCRIPT.replace("group = andon.init", f"{leaves}group = andon.init"))
    code, output = andon("run", "--workers=2", "mine.py", "3", "off", "0", cwd=tmp_path)
    assert code == 0 and (tmp_path / "elsewhere" / "digest").exists(), output


def test_a_run_that_is_stopped_while_all_its_workers_are_started_again_is_not_done(tmp_path: Path) -> None:
    script = SCRIPT.replace("import sys\n", "import os\nimport sys\nos.path.exists('began') and time.sleep(60)\n", 1)
    script = script.replace("import time\n", "", 1).replace("import os\n", "import os\nimport time\n", 1)
    dies = "    if step == 5:\n        open('began', 'w').close()\n        os._exit(5)\n    if step % 10"
    (tmp_path / "mine.py").write_text(script.replace("    if step % 10", dies))
    process = start("run", "--workers=2", "mine.py", "30", "off", "0", cwd=tmp_path)
    wait_for(process, lambda: len(workers_of(process)) == 2 and (tmp_path / "began").exists())
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    output = finish(process)
    assert process.returncode == 1 and "It was stopped while it waited for workers" in output, output
