"""Background threads of a save."""

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

LOWEST_PRIORITY = 19


def background(name: str, work: Callable[[], Any], prepare: Callable[[], None] = lambda: None) -> Future[Any]:
    """Run `prepare`, then `work`, in a daemon thread: unlike a pool's, it does not keep the process from ending."""
    task: Future[Any] = Future()

    def run() -> None:
        try:
            prepare()
            task.set_result(work())
        except BaseException as error:  # raised again by `result`
            task.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return task


def lowest_priority() -> None:
    """Let this thread run only when a core would be idle otherwise."""
    if sys.platform == "linux":  # elsewhere only a process has a priority
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
