"""Faults in what records and shows a run: its files, board, exports, commands about runs."""

from __future__ import annotations

from tests.mutants import Mutant

BOARD = "board/test_board.py::"
LEDGER = "membership/test_ledger.py::"
DISK = "checkpoint/test_disk_trouble.py::"

MUTANTS = [
    Mutant(
        "curve-keeps-steps-done-again",
        "After a resume the later steps stay in the curve.",
        "board/history.py",
        "        self.count = keep\n",
        "",
        (f"{BOARD}test_after_a_resume_the_curve_is_one_and_steps_done_again_are_shown_as_such",),
    ),
    Mutant(
        "spikes-averaged-away",
        "A bucket's highest value is its mean.",
        "board/curves.py",
        "as_list(np.fmax.reduceat(finite, starts))",
        "as_list(mean(finite, starts))",
        (f"{BOARD}test_a_large_file_opens_with_some_of_its_steps_and_all_other_events_and_is_then_read_whole",),
    ),
    Mutant(
        "bulk-forgets-mfu",
        "Steps that are read in bulk have no MFU.",
        "board/history.py",
        "last[2] if last and last[1] == name.encode()",
        'last[2] if last and last[1] == b"accuracy"',
        (f"{BOARD}test_a_large_file_opens_with_some_of_its_steps_and_all_other_events_and_is_then_read_whole",),
    ),
    Mutant(
        "released-keeps-its-lamp",
        "A worker that a smaller run has released keeps its seat.",
        "board/story.py",
        '            seat.leave(self.time, "released")\n',
        "",
        (f"{BOARD}test_a_lost_worker_leaves_a_gap_in_its_lane_and_another_takes_its_seat",),
    ),
    Mutant(
        "delta-has-everything",
        "Every delta has all rows of the curve.",
        "board/feed.py",
        "        first = self._rows\n",
        "        first = 0\n",
        (f"{BOARD}test_a_delta_has_only_what_is_new",),
    ),
    Mutant(
        "any-host-may-ask",
        "On loopback a rebound name is answered.",
        "board/access.py",
        'return host_of(headers.get("host", "")) in LOOPBACK',
        "return True",
        (f"{BOARD}test_the_page_is_small_comes_from_one_place_and_answers_only_to_this_machine",),
    ),
    Mutant(
        "cookie-is-the-token",
        "The cookie tells the run's token.",
        "board/access.py",
        'return hmac.new(self._token.encode(), b"andon board", sha256).hexdigest()',
        "return self._token",
        (f"{BOARD}test_off_loopback_nothing_is_readable_without_the_token",),
    ),
    Mutant(
        "marks-of-direction-shown",
        "A mark that turns the text around reaches the page.",
        "board/text.py",
        'TABLE = SPELLED_OUT | {code: f"\\\\u{code:04x}" for code in (*BIDI, *HIDDEN)}',
        "TABLE = SPELLED_OUT",
        (f"{BOARD}test_marks_and_control_characters_are_spelled_out",),
    ),
    Mutant(
        "lost-keeps-its-seat",
        "A lost worker's span does not end.",
        "board/story.py",
        '                seat.leave(self.time, "lost")\n',
        "",
        (f"{BOARD}test_a_lost_worker_leaves_a_gap_in_its_lane_and_another_takes_its_seat",),
    ),
    Mutant(
        "export-twice",
        "An export keeps steps that were done again.",
        "commands/runs/export.py",
        "        found.popitem()\n",
        "        break\n",
        (
            "commands/test_export.py::test_csv_has_each_step_once",
            "commands/test_export.py::test_tensorboard_reads_each_step_once",
        ),
    ),
    Mutant(
        "fault-in-the-command-to-try",
        "The command to try after a halt injects the fault again.",
        "run/screen/ending.py",
        'elif not word.startswith("--fault="):',
        "else:",
        ("commands/test_run_commands.py::test_a_halt_fits_one_screen_and_the_command_to_try_has_no_fault",),
    ),
    Mutant(
        "lines-into-a-removed-file",
        "Lines go into a file that was removed.",
        "run/records/lines.py",
        "        if not self._is_there():\n",
        "        if self._file.closed:\n",
        (f"{LEDGER}test_a_ledger_whose_folder_is_removed_goes_on_in_a_new_file_unless_another_run_has_the_folder",),
    ),
    Mutant(
        "another-runs-ledger",
        "A ledger whose folder another run has taken is written there.",
        "run/records/ledger.py",
        "if read_mark(self._folder) != self._mark:",
        "if not self._mark:",
        (f"{LEDGER}test_a_ledger_whose_folder_is_removed_goes_on_in_a_new_file_unless_another_run_has_the_folder",),
    ),
    Mutant(
        "half-a-line-in-a-new-file",
        "A new file begins with the rest of a line.",
        "run/records/lines.py",
        "            self._file, self._begun = file, 0\n",
        "            self._file = file\n",
        (f"{DISK}test_a_line_that_was_written_in_part_is_whole_in_a_new_file",),
    ),
    Mutant(
        "lines-without-limit",
        "Lines that wait for the disk take any amount of memory.",
        "run/records/lines.py",
        "if len(self._lines) > MAX_WAITING_BYTES:",
        "if len(self._lines) < 0:",
        (f"{LEDGER}test_a_ledger_that_cannot_be_written_takes_little_memory_and_has_no_gap_later",),
    ),
    Mutant(
        "ledger-with-a-gap",
        "After lost lines the ledger goes on.",
        "run/records/ledger.py",
        "        if self.failure:\n            return\n",
        "",
        (f"{LEDGER}test_a_ledger_that_cannot_be_written_takes_little_memory_and_has_no_gap_later",),
    ),
    Mutant(
        "damaged-lines-skipped",
        "A line that is not JSON is skipped.",
        "run/records/events.py",
        "                found = None\n",
        "                continue\n",
        (
            f"{LEDGER}test_a_damaged_ledger_is_named_with_the_command_that_lets_the_run_resume",
            "commands/test_export.py::test_a_damaged_line_is_named",
        ),
    ),
    Mutant(
        "no-locks-is-in-use",
        "A folder on a file system without locks counts as in use.",
        "run/records/folder.py",
        "except BlockingIOError:",
        "except OSError:",
        (f"{DISK}test_a_file_system_without_locks_is_not_called_in_use",),
    ),
]
