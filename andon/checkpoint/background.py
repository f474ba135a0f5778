"""Work beside training, in threads of its own."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

LOWEST = 19


def beside(name: str, prepare: Callable[[], None], work: Callable[[], Any]) -> Future[Any]:
    """Do work in a thread that does not keep the process from ending, as those of a pool would."""
    task: Future[Any] = Future()

    def run() -> None:
        try:
            prepare()
            task.set_result(work())
        except BaseException as error:  # whoever asks for the result gets it
            task.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return task


def be_humble() -> None:
    """Write only when the processor has nothing better to do."""
    if sys.platform == "linux":  # elsewhere a thread has no priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)
