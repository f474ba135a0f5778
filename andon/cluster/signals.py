"""Signals: the first Ctrl-C, SIGTERM or SIGHUP saves and leaves; the same signal again ends the process.

After a Ctrl-C torchrun also sends SIGTERM, which must not end the process: only the same signal twice does.
"""

import signal
from collections.abc import Callable
from types import FrameType

Handler = Callable[[int, FrameType | None], None] | signal.Handlers


def save_on_signal(save: Callable[[], None], second: Handler = signal.SIG_DFL) -> None:
    """Call `save` on the first SIGINT, SIGTERM or SIGHUP, and `second` when SIGINT or SIGTERM is repeated."""
    seen: list[int] = []

    def first(number: int, frame: FrameType | None) -> None:
        # A closing terminal sends SIGHUP more than once, which must not end the process before it has saved.
        signal.signal(number, signal.SIG_IGN if number == signal.SIGHUP else second)
        seen.append(number)
        if len(seen) == 1:
            save()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, first)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it, and so does this
        signal.signal(signal.SIGHUP, first)
