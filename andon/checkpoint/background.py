"""Background threads of a save."""

import _thread
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

LOWEST_PRIORITY = 19


def background(work: Callable[[], Any], prepare: Callable[[], None] = lambda: None) -> Future[Any]:
    """Run `prepare`, then `work`, in a thread that does not keep the process from ending.

    A `threading.Thread` would make the caller, a training step, wait until the new thread runs: 0.2 ms, and up to 4 ms
    on busy cores."""
    task: Future[Any] = Future()

    def run() -> None:
        try:
            prepare()
            task.set_result(work())
        except BaseException as error:  # raised again by `result`
            task.set_exception(error)

    _thread.start_new_thread(run, ())
    return task


def lowest_priority() -> None:
    """Let this thread run only when a core would be idle otherwise."""
    if sys.platform == "linux":  # elsewhere only a process has a priority
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
