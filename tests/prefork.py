"""Starts `python -m andon …` without waiting for torch: forks a process that has loaded it already.

A *nursery* is one process of a test session that has imported all of Andon. It forks the command that a test
starts; workers and gradient servers are forked by that command in the same way. Each is a process of its own,
with its own signals, files, folder and environment, as after an exec; importing torch again would take 1.6 s
for each.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

ANYTHING = 1 << 20  # bytes of a request
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
MS_BIND, MS_PRIVATE_BELOW = 0x1000, 0x44000
POPEN = subprocess.Popen


class Forked(subprocess.Popen[str]):
    """A process that this one, or its nursery, has forked instead of executing it."""

    nursery: socket.socket | None = None

    def __init__(self, command: list[str], machine: tuple[str, str] | None = None, **settings: Any) -> None:
        self.machine = machine
        super().__init__(command, **settings)

    def _execute_child(self, args: Any, *rest: Any) -> None:
        if args[1] != "-m" or not args[2].startswith(("andon", "pytest")):
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        names = POPEN._execute_child.__code__.co_varnames[2 : 2 + len(rest)]  # type: ignore[attr-defined]
        given = dict(zip(names, rest, strict=True))
        pipes = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        request = {
            "module": args[2],
            "arguments": args[3:],
            "cwd": str(given["cwd"] or Path.cwd()),
            "env": dict(os.environ if given["env"] is None else given["env"]),
            "new_session": bool(given["start_new_session"]),
            "machine": self.machine,
        }
        descriptors = [number if pipe == -1 else pipe for number, pipe in enumerate(pipes)]
        if Forked.nursery:
            socket.send_fds(Forked.nursery, [json.dumps(request).encode()], descriptors)
            self.pid = json.loads(Forked.nursery.recv(ANYTHING))
            self._pidfd = os.pidfd_open(self.pid)
        else:
            self.pid = _fork(request, descriptors)
        self._child_created = True
        self._close_pipe_fds(*(given[name] for name in names[names.index("p2cread") :][:6]))  # type: ignore[attr-defined]

    def _internal_poll(self, _deadstate: Any = None) -> int | None:
        if not Forked.nursery or self.returncode is not None:
            return super()._internal_poll(_deadstate)  # type: ignore[misc,no-any-return]
        if select.select([self._pidfd], [], [], 0)[0]:
            self._learn_returncode()
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if not Forked.nursery:
            return super()._wait(timeout)  # type: ignore[misc,no-any-return]
        if self.returncode is None:
            if not select.select([self._pidfd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self._learn_returncode()
        return self.returncode

    def _learn_returncode(self) -> None:
        assert Forked.nursery is not None
        Forked.nursery.sendall(json.dumps({"pid": self.pid}).encode())
        self.returncode = os.waitstatus_to_exitcode(json.loads(Forked.nursery.recv(ANYTHING)))
        os.close(self._pidfd)


def popen(command: list[str], machine: tuple[str, str] | None = None, **settings: Any) -> subprocess.Popen[str]:
    """As `subprocess.Popen` of `python -m andon …`, from the nursery of this process; in a network namespace and with a
    host name of its own if a `machine` is given."""
    if sys.platform != "linux":
        return subprocess.Popen(command, **settings)
    if Forked.nursery is None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        module = [sys.executable, "-m", "tests.prefork", str(theirs.fileno())]
        root = str(Path(__file__).parent.parent)
        subprocess.Popen(module, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, cwd=root)
        theirs.close()
        Forked.nursery = ours
    return Forked(command, machine, **settings)


def preload(*names: str) -> None:
    """Have the nursery of this process import modules that would take each of its processes seconds."""
    if sys.platform == "linux":
        if Forked.nursery is None:
            popen([sys.executable, "-m", "andon", "--version"], stdout=subprocess.DEVNULL).wait()
        assert Forked.nursery is not None
        Forked.nursery.sendall(json.dumps({"preload": names}).encode())
        Forked.nursery.recv(ANYTHING)


def serve(requests: socket.socket) -> None:
    """Fork, and tell how what was forked has ended, until nobody asks any more."""
    importlib.import_module("tests.preload")
    while True:
        data, descriptors, _, _ = socket.recv_fds(requests, ANYTHING, 3)
        if not data:
            return
        request = json.loads(data)
        if "preload" in request:
            reply = len([importlib.import_module(name) for name in request["preload"]])
            gc.collect()
            gc.freeze()
        elif "pid" in request:
            reply = os.waitpid(request["pid"], 0)[1]
        else:
            reply = _fork(request, descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
        requests.sendall(json.dumps(reply).encode())


def _fork(request: dict[str, Any], descriptors: list[int]) -> int:
    """Fork a process that runs a module as `python -m` would; gives its id."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        _become(request, descriptors)
        code = _run(request["module"], request["arguments"])
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
            sys.stdout.flush()
        os._exit(code)


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Take over what an executed process would have been given, and nothing else."""
    atexit._clear()  # what the parent would do at its end
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if request["new_session"]:
        os.setsid()
    if request["machine"]:
        _enter(*request["machine"])
    kept = [os.dup(descriptor) for descriptor in descriptors]
    for number, descriptor in enumerate(kept):
        os.dup2(descriptor, number)
    # Objects of the parent still know these numbers: they must stay taken, and lead nowhere.
    nowhere = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        if int(name) > 2 and int(name) != nowhere:
            with contextlib.suppress(OSError):  # the descriptor of this very listing
                os.dup2(nowhere, int(name), inheritable=False)
    os.close(nowhere)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    Forked.nursery = None
    subprocess.Popen = Forked  # type: ignore[misc,assignment]


def _enter(namespace: str, name: str) -> None:
    """As `ip netns exec` and `hostname` in a namespace for host names."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(function: str, *arguments: Any) -> None:
        if getattr(libc, function)(*arguments):
            raise OSError(ctypes.get_errno(), f"{function} for {namespace}")

    with open(f"/run/netns/{namespace}") as file:
        call("setns", file.fileno(), CLONE_NEWNET)
    call("unshare", CLONE_NEWNS | CLONE_NEWUTS)
    call("mount", None, b"/", None, MS_PRIVATE_BELOW, None)
    call("mount", f"/etc/netns/{namespace}/hosts".encode(), b"/etc/hosts", None, MS_BIND, None)
    socket.sethostname(name)


def _run(module: str, arguments: list[str]) -> int:
    sys.argv = [module, *arguments]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the module was imported before it is run
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    return 0


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
