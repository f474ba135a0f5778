"""A worker's control link, spoken word by word."""

from __future__ import annotations

import json
import struct
from typing import Any

from andon.control.coordinator import Coordinator
from andon.transport.tcp.frames import Hello
from andon.version import VERSION
from tests.cluster.coordinators import TOKEN
from tests.security.test_entrance_fuzz import exactly, introduced, message_frame


class Peer:
    """One connection of a process."""

    def __init__(self, coordinator: Coordinator, pid: int) -> None:
        self.sock = introduced(coordinator.address, TOKEN.encode(), Hello(0, 0, 0, "control"))
        self.me = {"version": VERSION, "host": "here", "machine": "m", "pid": pid, "rank": None}

    def say(self, kind: str, **fields: Any) -> None:
        self.sock.sendall(message_frame({"kind": kind, **fields}))

    def hear(self, *kinds: str) -> dict[str, Any]:
        """The next message of one of these kinds."""
        while True:
            (length,) = struct.unpack(">I", exactly(self.sock, 4))
            message: dict[str, Any] = json.loads(exactly(self.sock, length)[1:])
            if message["kind"] in kinds:
                return message

    def join(self) -> None:
        self.say("hello", **self.me)
        self.hear("job")
        self.say("ready", data="digest", folder="mark")
        self.hear("welcome")

    def again(self, generation: int, rank: int) -> None:
        self.say("again", **self.me, generation=generation, member=rank, local_rank=0, folder="mark")

    def part(self, generation: int) -> None:
        self.say("part", generation=generation, why="the server is silent", lost=None)

    def hear_the_end(self) -> None:
        """Wait until the coordinator has closed the connection."""
        while self.sock.recv(1 << 16):
            pass
