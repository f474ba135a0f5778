"""Groups: who exchanges, and the transports that carry it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from andon.errors import UserError

if TYPE_CHECKING:
    from andon.transport.base import Group, Rendezvous, Wire

TRANSPORTS = ("local", "shm", "star", "ring", "torch")


def open_group(
    transport: str,
    rendezvous: Rendezvous,
    *,
    timeout: float = 60.0,
    wire: Wire = "f32",
    host: str = "127.0.0.1",
    address: tuple[str, int] | None = None,
    token: str = "",
) -> Group:
    """Open a group with everyone at the rendezvous.

    `host` is where this rank can be reached (ring; torch, for rank 0), `address` the gradient server (star)
    and `token` what it wants to hear.
    """
    if transport == "local":
        from andon.transport.local import LocalGroup

        if rendezvous.world_size > 1:
            raise UserError(
                f"transport 'local' cannot connect {rendezvous.world_size} workers",
                "it is the group of one worker",
                "choose group.transport shm, star, ring or torch",
            )
        return LocalGroup()
    if transport == "shm":
        from andon.transport.shm.group import ShmGroup

        return ShmGroup.open(rendezvous, timeout, wire)
    if transport == "star":
        if address is None:
            raise ValueError("transport 'star' needs the address of the gradient server")
        from andon.transport.tcp.star import StarGroup

        return StarGroup.open(rendezvous, address, timeout, wire, token)
    if transport == "ring":
        from andon.transport.tcp.ring import RingGroup

        return RingGroup.open(rendezvous, host, timeout, wire)
    if transport == "torch":
        from andon.transport.torch_dist import init_torch

        return init_torch(rendezvous, host, timeout, wire)
    raise UserError(
        f"there is no transport {transport!r}",
        "group.transport names how workers exchange",
        f"choose one of {', '.join(TRANSPORTS)}",
    )
