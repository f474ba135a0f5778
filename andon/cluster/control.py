"""The control link: JSON messages between the coordinator and a worker.

One frame per message (tag 0x10, then a JSON object with its `kind`). The dialogue:
  worker       hello    "here I am: this version, host and process"
  coordinator  job      "this is the whole configuration, and the digest of the data"
  worker       ready    "I have data with this digest"
  coordinator  welcome  "you are this rank of so many"   (or refused, with the reason, at any point before)
  worker       value    "my value for this topic of the rendezvous is …"  (addresses, when a group is formed)
  coordinator  values   "these are everyone's values, by rank"
  worker       event    "this happened" (see andon.run.events)
  worker       failed   "I must stop, and this is why"
  coordinator  stop     "save and leave after this step"
  worker       bye      "I am done, with this exit code"
"""

import json
import threading
from typing import Any, Final

from andon.transport.base import ProtocolError
from andon.transport.tcp.connect import Link

TAG: Final = 0x10
LIMIT: Final = 16_000_000
COORDINATOR: Final = -1

Message = dict[str, Any]


class ControlLink:
    """Messages over one link; any thread may send, one thread receives."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._sending = threading.Lock()

    def send(self, kind: str, **fields: Any) -> None:
        """Send one message."""
        payload = bytes([TAG]) + json.dumps({"kind": kind, **fields}).encode()
        with self._sending:
            self.link.send_frame(payload, f"sending {kind}")

    def receive(self) -> Message:
        """Receive one message."""
        frame = self.link.receive_frame(LIMIT, "receiving a message")
        if frame[0] != TAG:
            raise ProtocolError(f"rank {self.link.peer} sent tag 0x{frame[0]:02x}, not 0x{TAG:02x}")
        try:
            message = json.loads(frame[1:])
        except ValueError as error:
            raise ProtocolError(f"rank {self.link.peer} sent a message that is not JSON: {error}") from None
        if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
            raise ProtocolError(f"rank {self.link.peer} sent a message without a kind")
        return message

    def close(self) -> None:
        """Close the connection."""
        self.link.close()
