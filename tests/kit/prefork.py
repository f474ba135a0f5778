"""Starts `python -m andon …` without waiting for torch: forks a process that has loaded it already.

The *source* is one process of a test session that has imported all of Andon. For every process of the session that
asks (pytest has several) it forks a *fork server*, which forks the commands that tests start; workers and gradient
servers are forked by those commands in the same way. Each is a process of its own, with its own signals, files, folder
and environment, as after an exec; importing torch again would take 1.6 s for each.
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
import struct
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests import ROOT

SOURCE = "ANDON_TEST_SOURCE"
"""The environment variable with the folder of the tree that the source has loaded, and its address."""
MODULES = ("andon", "pytest", "tests.kit.group_harness", "torch.distributed.run")
ANYTHING = 1 << 20  # bytes of a request
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
MS_BIND, MS_PRIVATE_BELOW = 0x1000, 0x44000
POPEN = subprocess.Popen


class Forked(subprocess.Popen[str]):
    """A process that this one, or its fork server, has forked instead of executing it."""

    fork_server: socket.socket | None = None

    def __init__(self, command: list[str], machine: tuple[str, str] | None = None, **settings: Any) -> None:
        self.machine, self._fork_server = machine, Forked.fork_server
        super().__init__(command, **settings)

    def _execute_child(self, args: Any, *rest: Any) -> None:
        words = [args[0], *args[2:]] if args[1] == "-u" else args  # as torchrun starts its ranks
        if words[1] != "-m" or not words[2].startswith(MODULES):
            self._fork_server = None
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        names = POPEN._execute_child.__code__.co_varnames[2 : 2 + len(rest)]  # type: ignore[attr-defined]
        given = dict(zip(names, rest, strict=True))
        pipes = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        request = {
            "module": words[2],
            "arguments": words[3:],
            "cwd": str(given["cwd"] or Path.cwd()),
            "env": dict(os.environ if given["env"] is None else given["env"]),
            "new_session": bool(given["start_new_session"]),
            "machine": self.machine,
        }
        descriptors = [number if pipe == -1 else pipe for number, pipe in enumerate(pipes)]
        if self._fork_server:
            socket.send_fds(self._fork_server, [json.dumps(request).encode()], descriptors)
            self.pid = json.loads(self._fork_server.recv(ANYTHING))
            self._pidfd = os.pidfd_open(self.pid)
        else:
            self.pid = _fork(request, descriptors)
        self._child_created = True
        self._close_pipe_fds(*(given[name] for name in names[names.index("p2cread") :][:6]))  # type: ignore[attr-defined]

    def _internal_poll(self, _deadstate: Any = None) -> int | None:
        if not self._fork_server or self.returncode is not None:
            return super()._internal_poll(_deadstate)  # type: ignore[misc,no-any-return]
        if select.select([self._pidfd], [], [], 0)[0]:
            self._learn_returncode()
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if not self._fork_server:
            return super()._wait(timeout)  # type: ignore[misc,no-any-return]
        if self.returncode is None:
            if not select.select([self._pidfd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self._learn_returncode()
        return self.returncode

    def _learn_returncode(self) -> None:
        assert self._fork_server is not None
        self._fork_server.sendall(json.dumps({"pid": self.pid}).encode())
        self.returncode = os.waitstatus_to_exitcode(json.loads(self._fork_server.recv(ANYTHING)))
        os.close(self._pidfd)


def popen(command: list[str], machine: tuple[str, str] | None = None, **settings: Any) -> subprocess.Popen[str]:
    """As `subprocess.Popen` of `python -m andon …`, from the fork server of this process; in a network namespace and
    with a host name of its own if a `machine` is given."""
    if sys.platform != "linux":
        return subprocess.Popen(command, **settings)
    Forked.fork_server = Forked.fork_server or _open_fork_server()
    return Forked(command, machine, **settings)


def preload(*libraries: str) -> None:
    """From now on fork processes that have loaded these modules, too, which would take each of them seconds."""
    if sys.platform == "linux":
        Forked.fork_server = _open_fork_server(libraries)


def share_source() -> None:
    """Have all processes of this test session fork from one source, which is started when the first of them asks."""
    if sys.platform != "linux" or os.environ.get(SOURCE, "").startswith(f"{ROOT}:"):
        return
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("")  # the kernel chooses an address that is no file
    listener.listen()
    os.environ[SOURCE] = f"{ROOT}:{listener.getsockname()[1:].decode()}"

    def start_when_asked() -> None:
        select.select([listener], [], [])
        command = [sys.executable, "-m", "tests.kit.prefork", str(listener.fileno())]
        quiet = {**os.environ, "OMP_WAIT_POLICY": "passive"}  # threads that spin take the cores from other tests
        passed = [listener.fileno()]
        # It ends when its input does, with this process.
        subprocess.Popen(command, env=quiet, cwd=ROOT, pass_fds=passed, stdin=subprocess.PIPE).wait()

    threading.Thread(target=start_when_asked, daemon=True).start()


def _open_fork_server(libraries: Sequence[str] = ()) -> socket.socket:
    share_source()
    fork_server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fork_server.connect(b"\0" + os.environ[SOURCE].rpartition(":")[2].encode())
    fork_server.sendall(json.dumps(libraries).encode())
    return fork_server


def fork_servers(listener: socket.socket) -> None:
    """The source: load what tests need, and fork a fork server for everyone who connects."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends pytest, whose end ends this process
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a fork server
    importlib.import_module("tests.kit.preload")
    while select.select([0, listener.fileno()], [], [])[0][0] != 0:
        connection, _ = listener.accept()
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", credentials)[1] != os.getuid():
            connection.close()
            continue
        libraries = json.loads(connection.recv(ANYTHING) or "[]")
        if not sys.modules.keys() >= set(libraries):
            for name in libraries:
                importlib.import_module(name)
            gc.collect()
            gc.freeze()
        if not os.fork():
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            serve(connection)
            os._exit(0)
        connection.close()


def serve(requests: socket.socket) -> None:
    """A fork server: fork, and tell how what was forked has ended, until nobody asks any more."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(requests, ANYTHING, 3)
        if not data:
            return
        request = json.loads(data)
        if "pid" in request:
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
    Forked.fork_server = None
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
    fork_servers(socket.socket(fileno=int(sys.argv[1])))
