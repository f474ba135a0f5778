"""Files over a control link: a worker that has no copy of the data receives it once from the coordinator.

The coordinator sends the files of a token set one after the other; the worker writes them into its cache and compares
their digests. The worker checks the names, because it creates files with them.
"""

import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

from andon.control.link import FILE_TAG, ControlLink, Message
from andon.control.loop import Loop
from andon.errors import UserError
from andon.transport.base import ProtocolError

NAME: Final = re.compile(
    r"meta\.json|tokenizer(_config)?\.json|tokens-\d{5}\.bin|samples-(ids|targets|starts|places)\.npy"
)
"""The files of a token set, and of the samples of a fine-tuning."""
PIECE_BYTES: Final = 256 << 10
MAX_QUEUED_BYTES: Final = 4 << 20
"""How much of the files may wait in the queue of a link."""
SPARE_BYTES: Final = 100 << 20
"""How much of the disk stays free."""


def send_files(link: ControlLink, loop: Loop, folder: Path) -> None:
    """Send the files of a token set as fast as the peer reads them; blocks, so it runs in a separate thread."""
    try:
        for path in sorted(folder.iterdir()):
            if NAME.fullmatch(path.name):
                link.queue("file", name=path.name, size=path.stat().st_size)
                for piece in _pieces(path):
                    link.queue_frame(bytes([FILE_TAG]) + piece)
                    loop.wake()
                    while link.waiting > MAX_QUEUED_BYTES and link in loop.links:
                        time.sleep(0.002)
                    if link not in loop.links:
                        return
        link.queue("file", name="", size=-1)
    except OSError as error:
        link.queue("refused", reason=f"the coordinator cannot read its data: {error.strerror}")
    loop.wake()


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            yield piece


class Receiver:
    """Writes the files that arrive into a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.received = folder, 0
        self._file: IO[bytes] | None = None
        self.left = 0

    def begin(self, message: Message) -> bool:
        """Begin the file that a message announces; False if the message says that there are no more."""
        if self.left:
            raise ProtocolError("it began a file before the last one had ended")
        if self._file:
            self._file.close()
            self._file = None
        if message["size"] < 0:
            return False
        if not NAME.fullmatch(message["name"]) or (self.folder / message["name"]).exists():
            raise ProtocolError(f"it sent a file named {message['name']!r:.100}")
        if message["size"] > shutil.disk_usage(self.folder).free - SPARE_BYTES:
            what = f"The data does not fit on the disk of {self.folder}"
            raise UserError(what, f"{message['name']} has {message['size']:,} bytes", "Free some disk space there")
        self._file = open(self.folder / message["name"], "xb")  # noqa: SIM115 (closed when the next one begins)
        self.left = message["size"]
        return True

    def write(self, piece: bytes) -> None:
        """Write a piece of the current file."""
        if self._file is None or len(piece) > self.left:
            raise ProtocolError("it sent more of a file than it had announced")
        self._file.write(piece)
        self.left -= len(piece)
        self.received += len(piece)
        if not self.left:
            self._file.flush()
            os.fsync(self._file.fileno())
