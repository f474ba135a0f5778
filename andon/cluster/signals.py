"""Signals: the first Ctrl-C, SIGTERM or SIGHUP saves and leaves, the same once more ends the process.

After a Ctrl-C torchrun sends SIGTERM as well, which is no second wish: a signal counts as one only if it comes again.
"""

import signal
from collections.abc import Callable
from types import FrameType

Handler = Callable[[int, FrameType | None], None] | signal.Handlers


def save_on_signal(save: Callable[[], None], second: Handler = signal.SIG_DFL) -> None:
    """Call `save` on the first SIGINT, SIGTERM or SIGHUP, and `second` on a SIGINT or SIGTERM that comes again."""
    seen: list[int] = []

    def first(number: int, frame: FrameType | None) -> None:
        # A terminal that closes sends SIGHUP more than once, which is no wish to quit without a save.
        signal.signal(number, signal.SIG_IGN if number == signal.SIGHUP else second)
        seen.append(number)
        if len(seen) == 1:
            save()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, first)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it
        signal.signal(signal.SIGHUP, first)
