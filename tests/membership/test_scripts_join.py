"""Workers of `andon run` that are started again take part only if they compute what the others compute."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.runs import andon
from tests.membership.test_scripts_go_on import (
    assert_ended_alike,
    returns_in_ledger,
    script_that_dies,
    undisturbed_script,
)


def test_a_worker_whose_script_has_changed_does_not_join(tmp_path: Path) -> None:
    alone, run = tmp_path / "alone", tmp_path / "run"
    undisturbed_script(alone, 40)
    script_that_dies(run, "exchange", 12, rank=1)
    changes = (
        "if group.rank == 1 and not group.joins:\n    open('mine.py', 'a').write('# changed')\nfor step in model.st"
    )
    script = (run / "mine.py").read_text()
    (run / "mine.py").write_text(script.replace("for step in model.st", changes))
    code, output = andon("run", "--workers=3", "mine.py", "40", "off", "0.05", cwd=run)
    assert code == 0 and "was lost" in output, output
    assert "cannot join: it has another script" in output, output
    assert_ended_alike(run, alone, 40)


@pytest.mark.parametrize("step", [5, 16])
def test_a_worker_takes_part_again_only_in_the_loop_that_it_has_reached(tmp_path: Path, step: int) -> None:
    alone, run = tmp_path / "alone", tmp_path / "run"
    undisturbed_script(alone, 20)
    script_that_dies(run, "exchange", step, rank=1)
    script = (run / "mine.py").read_text()
    begin, end = script.index("for step in model.steps"), script.index("if group.rank == 0:\n    print(andon.digest")
    loop = script[begin:end]
    first = loop.replace("int(sys.argv[1])", "10")
    (run / "mine.py").write_text(script[:begin] + first + loop.replace("(start,", "(10,") + script[end:])
    code, output = andon("run", "--workers=3", "mine.py", "20", "off", "0.05", cwd=run)
    assert code == 0 and "was lost" in output, output
    assert ("cannot join: it has another loop over steps" in output) == (step > 10), output
    assert_ended_alike(run, alone, 20)


@pytest.mark.parametrize("all_die", [False, True])
def test_a_worker_does_not_take_part_in_a_loop_with_other_bounds(tmp_path: Path, all_die: bool) -> None:
    alone, run = tmp_path / "alone", tmp_path / "run"
    undisturbed_script(alone, 40)
    script_that_dies(run, "exchange", 26, rank=1)
    script = (run / "mine.py").read_text().replace("(start, int(sys.argv[1]))", "(start, start + 20)")
    if all_die:  # the others end because they do not handle the loss
        script = script.replace(
            "    scheduler.step()\n", "    andon.mean(group, torch.ones(1))\n    scheduler.step()\n"
        )
    (run / "mine.py").write_text(script)
    for code in (0, int(all_die)):
        found, output = andon("run", "--workers=3", "mine.py", "", "off", "0.05", cwd=run)
        assert found == code, output
    if all_die:
        assert "The run cannot go on" in output and "have another loop over steps" in output, output
        assert "Run the same command again" in output, output
    else:
        assert "cannot join: it has another loop over steps" in output, output
        assert_ended_alike(run, alone, 40)


def test_a_worker_that_computes_alone_what_the_others_computed_together_does_not_join(tmp_path: Path) -> None:
    script_that_dies(tmp_path / "run", "exchange", 12, rank=1)
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    scales = (
        "scale = torch.tensor([float(os.environ['ANDON_RANK'])])\nandon.mean(group, scale)\nfor step in model.steps"
    )
    script = (tmp_path / "run" / "mine.py").read_text().replace("torch.randn(16, 8)", "scale * torch.randn(16, 8)")
    (tmp_path / "run" / "mine.py").write_text(script.replace("for step in model.steps", scales))
    (undisturbed / "mine.py").write_text((tmp_path / "run" / "mine.py").read_text())
    (undisturbed / "died").touch()
    for folder in (tmp_path / "run", undisturbed):
        code, output = andon("run", "--workers=3", "mine.py", "20", "off", "0.05", cwd=folder)
        assert code == 0, output
        assert ("another result of andon.mean, computed alone" in output) == (folder != undisturbed), output
    assert (tmp_path / "run" / "digest").read_text() == (undisturbed / "digest").read_text()


DIES_IN_A_JOIN = """
import andon.cluster.scripts.group
enter, mine = andon.cluster.scripts.group.enter_generation, "reached-" + os.environ["ANDON_RANK"]
def die_in_a_join(*arguments):
    if mine in VICTIMS and group.world_size == 3 and not os.path.exists(mine):
        open(mine, "w").close()
        while not all(map(os.path.exists, VICTIMS)):
            time.sleep(0.01)
        os.kill(os.getpid(), 9)
    return enter(*arguments)
andon.cluster.scripts.group.enter_generation = die_in_a_join
if group.joins:
    open("joining", "w").close()
for step in model.steps(start, int(sys.argv[1])):
    while step == 20 and not os.path.exists("joining"):
        time.sleep(0.05)
"""


@pytest.mark.parametrize("victims", [["reached-2"], ["reached-0", "reached-2"]], ids=["one", "all"])
def test_a_worker_that_joins_has_the_schedule_of_its_weights_whoever_is_lost_meanwhile(
    tmp_path: Path, victims: list[str]
) -> None:
    """A worker that is left alone before it has the schedule goes back to a checkpoint."""
    alone, run = tmp_path / "alone", tmp_path / "run"
    undisturbed_script(alone, 60)
    script_that_dies(run, "exchange", 18, rank=1)
    script, loop = (run / "mine.py").read_text(), "for step in model.steps(start, int(sys.argv[1])):\n"
    (run / "mine.py").write_text(script.replace(loop, DIES_IN_A_JOIN.replace("VICTIMS", repr(victims))))
    code, output = andon("run", "--workers=3", "mine.py", "60", "off", "0.05", cwd=run)
    assert code == 0 and all((run / name).exists() for name in victims), output
    assert len(returns_in_ledger(run, 60)) == (len(victims) == 2)
    assert_ended_alike(run, alone, 60)
