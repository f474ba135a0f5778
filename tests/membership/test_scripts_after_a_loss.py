"""Scripts of `andon run` after the loss of a worker: what they may do before the next step, and how they end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.runs import andon
from tests.membership.test_scripts_go_on import (
    SCRIPT,
    assert_ended_alike,
    ledger_of,
    returns_in_ledger,
    saved_steps,
    script_that_dies,
    undisturbed_script,
)

DIES_ALONE = """
import os, sys, time, torch, andon
group = andon.init()
rank, first = os.environ["ANDON_RANK"], not os.path.exists("died")
if rank == "1" and first:
    open("died", "w").close()
    os._exit(5)
MEETS
print(group.world_size, file=open("out-" + rank, "w"))
group.close()
"""
WAITS = """
until = time.monotonic() + 60
while rank == "0" and not os.path.exists("out-1") and time.monotonic() < until:
    time.sleep(0.1)
"""


@pytest.mark.parametrize(
    "meets, message",
    [("andon.mean(group, torch.ones(1))", "was lost"), (WAITS, "computed apart from the others")],
    ids=["andon.mean", "nothing"],
)
def test_a_script_without_a_loop_over_steps_fails_if_a_worker_is_lost(tmp_path: Path, meets: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(DIES_ALONE.replace("MEETS", meets))
    code, output = andon("run", "--workers=2", "mine.py", cwd=tmp_path)
    assert code == 1 and message in output, output
    assert not (tmp_path / "out-0").exists() or meets == WAITS


def test_a_worker_joins_without_the_caches_that_forward_has_made(tmp_path: Path) -> None:
    alone, run = tmp_path / "alone", tmp_path / "run"
    undisturbed_script(alone, 40)
    script_that_dies(run, "exchange", 12, rank=1)
    cache = "class Caches(nn.Linear):\n    def __init__(self):\n        super().__init__(16, 4)\n"
    cache += "        self.register_buffer('grown', torch.zeros(1), persistent=False)\n"
    cache += "        self.register_buffer('made', None, persistent=False)\n"
    cache += "    def forward(self, x):\n        self.made, self.grown = x.detach() > 0, x.detach()[0]\n"
    cache += "        return super().forward(x)\n"
    script = (run / "mine.py").read_text().replace("nn.Linear(16, 4)]", "Caches()]")
    (run / "mine.py").write_text(script.replace("group = andon.init", f"{cache}group = andon.init"))
    code, output = andon("run", "--workers=3", "mine.py", "40", "off", "0.05", cwd=run)
    assert code == 0 and "is started again" in output and (run / "died").exists(), output
    assert_ended_alike(run, alone, 40)


LOADS_AND_EVALUATES = """
    if step in loads:
        loads.remove(step)
        if group.rank == 1:
            os.kill(os.getpid(), 9)
        andon.load("mine", model, optimizer, scheduler)
        model.eval()
        with torch.no_grad():
            value = model(torch.ones(16, 8)).sum().item()
        print(step, value, file=open(f"value-{group.rank}", "w"))
        model.train()
        continue
    if step % 10"""


def test_what_a_script_evaluates_after_a_load_is_the_checkpoint(tmp_path: Path) -> None:
    """The load fails, because a worker is lost instead of taking part in it."""
    script = SCRIPT.replace("\n    if step % 10", LOADS_AND_EVALUATES)
    first = "import os\nloads = set() if group.joins else {25}\nfor step in model.steps"
    (tmp_path / "mine.py").write_text(script.replace("for step in model.steps", first))
    code, output = andon("run", "--workers=3", "mine.py", "30", "off", "0.02", cwd=tmp_path)
    assert code == 0 and "was lost" in output, output
    assert not list(tmp_path.glob("value-*")), "there was no checkpoint to evaluate"


def test_a_script_whose_evaluation_times_out_goes_on(tmp_path: Path) -> None:
    """A rank hangs in a step, so the others have no weights of this step to evaluate."""
    alone, run = tmp_path / "alone", tmp_path / "run"
    undisturbed_script(alone, 30)
    script_that_dies(run, "exchange", 22, rank=1)
    script = (run / "mine.py").read_text().replace("os.kill(os.getpid(), 9)", "time.sleep(6)")
    evaluates = "\n    andon.digest(model)\n    if step % 10"
    script = script.replace("init(seed=1)", "init(timeout=2, seed=1)").replace("\n    if step % 10", evaluates)
    (run / "mine.py").write_text(script)
    code, output = andon("run", "--workers=3", "mine.py", "30", "off", "0", cwd=run)
    assert code == 0 and "is started again" in output, output
    assert_ended_alike(run, alone, 30)


def test_a_step_whose_halt_a_script_ignores_is_not_repeated_for_ever(tmp_path: Path) -> None:
    loss = "F.cross_entropy(model(torch.randn(16, 8) + y[:, None]), y)"
    script = SCRIPT.replace(loss, f"{loss} * (float('nan') if step == 5 else 1)")
    ignores = "    try:\n        optimizer.step()\n    except andon.JidokaHalt:\n        continue\n"
    (tmp_path / "mine.py").write_text(script.replace("    optimizer.step(clip=1.0)\n", ignores))
    code, output = andon("run", "--workers=2", "mine.py", "10", "off", "0", cwd=tmp_path)
    assert code == 1 and "step 5 was not ended" in output, output


def test_a_script_whose_ranks_disagree_ends_at_once_with_what_they_call(tmp_path: Path) -> None:
    script = SCRIPT.replace("int(sys.argv[1]))", "int(sys.argv[1]) + group.rank)")
    (tmp_path / "mine.py").write_text(script)
    code, output = andon("run", "--workers=2", "mine.py", "5", "off", "0", cwd=tmp_path)
    assert code == 1 and "all ranks must call the same collective" in output, output
    assert sum("hosts" in line for line in ledger_of(tmp_path)) == 1, "nothing is tried again"


def test_a_step_that_is_repeated_is_saved_once(tmp_path: Path) -> None:
    run = tmp_path / "run"
    script_that_dies(run, "exchange", 30, rank=1)  # the script asks for the save of a step that was not committed
    script = (run / "mine.py").read_text()
    (run / "mine.py").write_text(script.replace("optimizer, scheduler)", "optimizer, scheduler, keep=9)"))
    code, output = andon("run", "--workers=3", "mine.py", "40", "off", "0.02", cwd=run)
    assert code == 0 and "was lost" in output, output
    assert 29 not in saved_steps(run)
    assert returns_in_ledger(run, 40) == []


def test_all_workers_that_are_started_again_with_an_edited_script_end_the_run(tmp_path: Path) -> None:
    script_that_dies(tmp_path, "exchange", 12, rank=1)
    edits = "if not group.joins and group.rank == 0:\n    open('mine.py', 'a').write('# edited')\nfor step in model.st"
    script = (tmp_path / "mine.py").read_text().replace("for step in model.st", edits)
    ends = "    andon.mean(group, torch.ones(1))\n    scheduler.step()\n"  # which does not handle the loss
    (tmp_path / "mine.py").write_text(script.replace("    scheduler.step()\n", ends))
    code, output = andon("run", "--workers=3", "mine.py", "40", "off", "0.05", cwd=tmp_path)
    assert code == 1 and "The run cannot go on" in output, output
    assert "those that were started again have another script" in output, output


def test_a_script_that_does_not_begin_a_group_ends_as_it_does(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("print('nothing to do')\n")
    code, output = andon("run", "--workers=2", "mine.py", cwd=tmp_path)
    assert code == 0 and "nothing to do" in output, output


def test_a_worker_that_ends_before_its_script_has_ended_is_an_error(tmp_path: Path) -> None:
    """The others may have ended before it is started again."""
    waits = WAITS.replace("until = ", "import os\nuntil = ").replace("out-1", "ends")
    ends = f"{waits}if rank == '1':\n    open('ends', 'w').close()\n    os._exit(5)\n"
    begin = "import os, time, andon\ngroup = andon.init()\nrank = os.environ['ANDON_RANK']\n"
    again = "if os.path.exists('ends'):\n    time.sleep(60)\n"
    (tmp_path / "mine.py").write_text(begin.replace("group", f"{again}group") + ends + "group.close()\n")
    code, output = andon("run", "--workers=2", "mine.py", cwd=tmp_path)
    assert code and "was lost" in output, output
