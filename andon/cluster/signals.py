"""Signals: the first Ctrl-C or SIGTERM saves and leaves, the same signal again ends the process."""

import signal
from collections.abc import Callable
from types import FrameType

Handler = Callable[[int, FrameType | None], None] | signal.Handlers


def save_on_signal(save: Callable[[], None], second: Handler = signal.SIG_DFL) -> None:
    """Call `save` on the first SIGINT or SIGTERM and `second` when the same signal comes again."""

    def first(number: int, frame: FrameType | None) -> None:
        signal.signal(number, second)
        save()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, first)
