"""Background threads of a save."""

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

LOWEST = 19


def background(name: str, prepare: Callable[[], None], work: Callable[[], Any]) -> Future[Any]:
    """Work in a daemon thread: unlike those of a pool, it does not keep the process from ending."""
    task: Future[Any] = Future()

    def run() -> None:
        try:
            prepare()
            task.set_result(work())
        except BaseException as error:  # whoever asks for the result gets it
            task.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return task


def lowest_priority() -> None:
    """Give this thread the processor only when nothing else wants it."""
    if sys.platform == "linux":  # elsewhere a thread has no priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)
