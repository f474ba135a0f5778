"""Machines for tests: network namespaces on one switch, each with addresses and a name.

`network("alpha", "beta")` gives hosts that see each other; `host.start("worker", "alpha", cwd=folder)` runs `andon` on
one, `host.cut()` makes it a black hole. The switch is a bridge of the kernel. With `weather` it is a thread of the test
that passes Ethernet frames on late, or not at all (as the kernel's netem does, where there is one).
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

from tests.kit import runs
from tests.kit.runs import NOTHING


@dataclass(frozen=True)
class Weather:
    """What happens to every frame: it takes so many seconds, more or less, or is lost with this probability."""

    delay: float
    jitter: float
    loss: float


class Host:
    """One machine: a network namespace, and a host name of its own."""

    def __init__(self, name: str, number: int, switch: str) -> None:
        self.name, self.namespace, self.switch = name, f"{switch}-{name}", switch
        self.address, self.address6 = f"10.77.0.{number}", f"fd77::{number}"
        self.port = f"p{number}"

    def open(self, weather: Weather | None) -> None:
        _ip("netns", "add", self.namespace)
        if weather:
            _ip("-n", self.namespace, "tuntap", "add", "eth0", "mode", "tap")
        else:
            _ip("link", "add", "eth0", "netns", self.namespace, "type", "veth", "peer", self.port, "netns", self.switch)
            _ip("-n", self.switch, "link", "set", self.port, "master", "br0", "up")
        for address in (f"{self.address}/24", f"{self.address6}/64"):
            _ip("-n", self.namespace, "addr", "add", address, "dev", "eth0", "nodad")
        for device in ("lo", "eth0"):
            _ip("-n", self.namespace, "link", "set", device, "up")

    def close(self) -> None:
        _ip("netns", "del", self.namespace)
        shutil.rmtree(f"/etc/netns/{self.namespace}", ignore_errors=True)

    def add_interface(self, device: str, address: str, up: bool = True) -> None:
        """An interface that leads nowhere."""
        _ip("-n", self.namespace, "link", "add", device, "type", "veth", "peer", f"{device}x")
        _ip("-n", self.namespace, "addr", "add", address, "dev", device)
        if up:
            _ip("-n", self.namespace, "link", "set", device, "up")

    def cut(self) -> None:
        """A black hole: from now on nothing arrives, and nobody is told."""
        _run("bridge", "-n", self.switch, "link", "set", "dev", self.port, "state", "0")

    def mend(self) -> None:
        """The end of the black hole."""
        _run("bridge", "-n", self.switch, "link", "set", "dev", self.port, "state", "3")

    def popen(self, *command: str, cwd: Path, more: Mapping[str, str] = NOTHING) -> subprocess.Popen[str]:
        """Start a command on this machine."""
        named = ["unshare", "--uts", "sh", "-c", f'hostname {self.name}; exec "$@"', "sh", *command]
        return runs.launch(["ip", "netns", "exec", self.namespace, *named], cwd, executed=True, more=more)

    def start(
        self,
        *arguments: str,
        cwd: Path,
        executed: bool = False,
        more: Mapping[str, str] = NOTHING,
        output: int | IO[str] = subprocess.PIPE,
    ) -> subprocess.Popen[str]:
        """Start `andon …` on this machine: forked from a process that has torch loaded, or really `executed`; `more` is
        added to its environment."""
        command = [sys.executable, "-m", "andon", *arguments]
        if executed:
            return self.popen(*command, cwd=cwd, more=more)
        return runs.launch(command, cwd, output=output, machine=(self.namespace, self.name), more=more)


class Relay(threading.Thread):
    """The switch of a network with weather: every frame goes to the host with its address, or to all."""

    def __init__(self, namespaces: Sequence[str], weather: Weather, seed: int = 1) -> None:
        super().__init__(daemon=True)
        self.weather, self.ended = weather, False
        self._random = random.Random(seed)
        self._ports = [_open_tap(namespace) for namespace in namespaces]
        self._homes: dict[bytes, int] = {}
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._count = 0

    def run(self) -> None:
        while not self.ended:
            left = self._waiting[0][0] - time.monotonic() if self._waiting else 0.1
            for port in select.select(self._ports, [], [], max(0.0, min(left, 0.1)))[0]:
                self._receive(port, os.read(port, 1 << 16))
            while self._waiting and self._waiting[0][0] <= time.monotonic():
                _, _, port, data = heapq.heappop(self._waiting)
                with suppress(OSError):  # the interface is not up yet
                    os.write(port, data)
        for port in self._ports:
            os.close(port)

    def _receive(self, source: int, data: bytes) -> None:
        self._homes[data[6:12]] = source
        home = self._homes.get(data[:6])
        for port in [home] if home is not None else [port for port in self._ports if port != source]:
            if self._random.random() >= self.weather.loss:
                delay = self.weather.delay + self.weather.jitter * self._random.uniform(-1, 1)
                self._count += 1
                heapq.heappush(self._waiting, (time.monotonic() + delay, self._count, port, data))


def _open_tap(namespace: str) -> int:
    """The switch's end of the interface eth0 of a namespace, opened by a thread that enters it."""

    def enter_and_open() -> int:
        with open(f"/run/netns/{namespace}") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0x40000000):
                raise OSError(ctypes.get_errno(), "setns")
        descriptor = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(descriptor, 0x400454CA, struct.pack("16sH14x", b"eth0", 0x1002))  # a TAP without packet information
        return descriptor

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(enter_and_open).result()


@contextmanager
def network(*names: str, weather: Weather | None = None) -> Iterator[dict[str, Host]]:
    """Machines that see each other, by name; the test is skipped where there are no network namespaces."""
    switch = f"andon{os.getpid()}"
    hosts = {name: Host(name, number, switch) for number, name in enumerate(names, 1)}
    with ExitStack() as undo:
        try:
            _ip("netns", "add", switch)
            undo.callback(_ip, "netns", "del", switch)
            _ip("-n", switch, "link", "add", "br0", "type", "bridge")
            _ip("-n", switch, "link", "set", "br0", "up")
            for host in hosts.values():
                host.open(weather)
                undo.callback(host.close)
                etc = Path("/etc/netns") / host.namespace
                etc.mkdir(parents=True)
                lines = [f"{other.address} {other.name}\n{other.address6} {other.name}6" for other in hosts.values()]
                (etc / "hosts").write_text("\n".join(["127.0.0.1 localhost", "::1 localhost", *lines, ""]))
            if weather:
                relay = Relay([host.namespace for host in hosts.values()], weather)
                relay.start()
                undo.callback(relay.join, 5)
                undo.callback(setattr, relay, "ended", True)
        except (OSError, subprocess.CalledProcessError) as error:
            reason = getattr(error, "stderr", "") or str(error)
            pytest.skip(f"network namespaces cannot be made here: {reason.strip()}")
        yield hosts


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
