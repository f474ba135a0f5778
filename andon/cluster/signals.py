"""Signals: the first Ctrl-C, SIGTERM or SIGHUP saves and leaves, a second one ends the process."""

import signal
from collections.abc import Callable
from types import FrameType

Handler = Callable[[int, FrameType | None], None] | signal.Handlers


def save_on_signal(save: Callable[[], None], second: Handler = signal.SIG_DFL) -> None:
    """Call `save` on the first SIGINT, SIGTERM or SIGHUP, and `second` on the next SIGINT or SIGTERM."""

    def first(number: int, frame: FrameType | None) -> None:
        _handle(second)
        # A terminal that closes sends SIGHUP more than once, which is no wish to quit without a save.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        save()

    _handle(first)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it
        signal.signal(signal.SIGHUP, first)


def _handle(handler: Handler) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)
