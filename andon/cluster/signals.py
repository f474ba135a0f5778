"""Signals: the first Ctrl-C or SIGTERM saves and leaves, the second ends the process."""

import signal
from collections.abc import Callable
from types import FrameType

Handler = Callable[[int, FrameType | None], None] | signal.Handlers


def save_on_signal(save: Callable[[], None], second: Handler = signal.SIG_DFL) -> None:
    """Call `save` on the first SIGINT or SIGTERM, and `second` on the next one of either kind."""

    def first(number: int, frame: FrameType | None) -> None:
        _handle(second)
        save()

    _handle(first)


def _handle(handler: Handler) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)
