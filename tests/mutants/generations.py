"""Faults in generations, commit and catch-up."""

from __future__ import annotations

from tests.mutants import Mutant

MODEL = "test_generations.py::test_every_interleaving_keeps_the_promises"
GOES_ON = "test_goes_on.py::test_a_killed_worker_comes_back_and_the_answer_stays"

MUTANTS = [
    Mutant(
        "late-verdict-ignored",
        "A rank that is told a verdict late does not update.",
        "engine/recovery/commit.py",
        "each.step == newest.step - 1 and each.reduced",
        "each.step == newest.step + 1 and each.reduced",
        ("test_generations.py::test_a_late_worker_takes_over_the_verdict_and_a_new_one_receives_everything",),
    ),
    Mutant(
        "oldest-step-counts",
        "A committed step is done again.",
        "engine/recovery/commit.py",
        "newest = max(known, key=lambda standing: standing.step)",
        "newest = min(known, key=lambda standing: standing.step)",
        (MODEL,),
    ),
    Mutant(
        "records-not-handed-on",
        "What only a lost rank has reported of is missing in the ledger.",
        "engine/recovery/commit.py",
        "self.records = {**settled.records, **self.records}",
        "self.records = {}",
        (MODEL,),
    ),
    Mutant(
        "lost-parts-are-zero",
        "State that nobody holds is taken for there.",
        "engine/recovery/commit.py",
        "        if not holders:\n            return None\n",
        "        if not holders:\n            continue\n",
        ("test_generations.py::test_parts_come_from_those_who_hold_them_and_a_missing_part_is_lost",),
    ),
    Mutant(
        "generation-before-all-have-parted",
        "A generation begins while members of the one before can still commit.",
        "control/generations/generations.py",
        "if self.over or self.returning or len(self.parted) < len(self.members):",
        "if self.over or self.returning:",
        (MODEL,),
    ),
    Mutant(
        "generation-after-the-end",
        "A generation begins though a member has come to the end.",
        "control/generations/generations.py",
        "if self.over or self.returning or len(self.parted) < len(self.members):",
        "if self.returning or len(self.parted) < len(self.members):",
        (MODEL,),
    ),
    Mutant(
        "early-report-is-lost",
        "A report that comes before the one of the step before is dropped.",
        "run/chain.py",
        "        if step > self.step:\n            self._early.setdefault(step, record)\n",
        "        if step == self.step + 1:\n            self._early.setdefault(step, record)\n",
        (MODEL, "test_ledger.py"),
    ),
    Mutant(
        "report-twice",
        "A step that two ranks report is in the ledger twice.",
        "run/chain.py",
        "        if step > self.step:\n",
        "        if step >= self.step:\n",
        ("test_ledger.py",),
        equivalent="what is kept under a step that is recorded already is never looked for",
    ),
    Mutant(
        "state-not-sent",
        "A worker that joins has the optimizer state of the first step.",
        "engine/recovery/transfer.py",
        "    keeps = rule is before and group.rank not in settled.new\n",
        "    keeps = rule is before\n",
        (GOES_ON,),
    ),
    Mutant(
        "audit-does-not-look-at-samples",
        "A step that was computed from other samples passes the audit.",
        "commands/audit.py",
        "if found != checksum(self.batches.windows(step, slot)):",
        "if found < 0:",
        ("test_ledger.py",),
    ),
    Mutant(
        "audit-allows-gaps",
        "A missing step passes the audit.",
        "commands/audit.py",
        "if step != self.step + 1:",
        "if step <= self.step:",
        ("test_ledger.py",),
    ),
    Mutant(
        "no-quarantine",
        "A worker that dies again and again is let in for ever.",
        "control/generations/quarantine.py",
        "return self._strikes[place] >= STRIKES",
        "return False",
        ("test_ledger.py", "test_goes_on.py::test_a_worker_that_dies_again_and_again_is_quarantined"),
    ),
    Mutant(
        "failed-step-keeps-its-schedule",
        "A schedule that has gone on after a step that failed is not set back.",
        "run/script.py",
        "        known.undo()  # before others take it over\n",
        "        known._before_redo = None\n",
        ("test_goes_on.py::test_a_script_survives_the_loss_of_a_worker",),
    ),
    Mutant(
        "dead-nursery-is-asked",
        "Workers are not started again once the process that forks them has died.",
        "cluster/nursery.py",
        "        if self._process.poll() is not None:\n",
        "        if self._process.poll() == 0:\n",
        ("test_goes_on.py::test_workers_outlive_the_process_that_forked_them_and_others_are_forked_by_another",),
    ),
    Mutant(
        "steps-done-again-count-twice",
        "Goodput counts steps that are done again after a return to a checkpoint.",
        "bench/goodput.py",
        "part.steps += self.steps[now] - self.steps[begun]",
        "part.steps += now - begun",
        ("test_goodput.py",),
    ),
]
