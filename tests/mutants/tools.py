"""Faults in what shows a run: board, exports, commands about runs."""

from __future__ import annotations

from tests.mutants import Mutant

BOARD = "board/test_board.py::"

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
        "            del found[later]\n",
        "            pass\n",
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
]
