"""The adapter over torch.distributed: Gloo, NCCL, or any other backend of the cluster.

The one order of addition needs every contribution in one place, so a reduce-scatter is an all-to-all of *parts* (each
rank sends part j of each of its rows to rank j), after which every rank adds its own part in the order of
`andon.engine.gradients.order`. With the all-gather that follows, a rank sends as many bytes as in a ring. All transfers
are point to point: each has exactly one peer, which an error can name.
"""

import contextlib
import hmac
import os
import re
import secrets
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise
from queue import Empty, SimpleQueue
from typing import Final, Self

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from andon.engine.gradients.order import Order, shares
from andon.errors import UserError
from andon.transport.base import SOMEONE, Group, GroupTimeout, PeerLost, ProtocolError, Rendezvous, Settings
from andon.transport.keys import LinkKeys
from andon.transport.rows import first_row, one_node_each, rows_of
from andon.transport.tcp.connect import listen
from andon.transport.torch_backend import gloo_at

Transfer = tuple[int, torch.Tensor]  # a peer, and what is sent or received
Outcome = tuple[int, Exception | None]  # a peer, and how its transfers failed
SMALL_BYTES: Final = 64 << 10  # up to here every rank adds up everything, which saves the all-gather
GRACE_SECONDS: Final = 0.3  # that other transfers get to finish after one has failed
POLL_SECONDS: Final = 0.002  # spent polling before a thread is started to wait


class TorchGroup(Group):
    """The ranks of an initialised process group (the default one unless given); `owned`: `leave` destroys it."""

    transport = "torch"

    def __init__(
        self, process_group: dist.ProcessGroup | None = None, settings: Settings = Settings(), owned: bool = False
    ) -> None:
        self.process_group, self.timeout, self.wire = process_group, settings.timeout, settings.wire
        self.rank, self.world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
        nccl = dist.get_backend(process_group) == "nccl"
        # With its index: on another thread, "cuda" is the first GPU.
        self.device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
        self._peers = dist.get_process_group_ranks(process_group)
        self._owned = owned
        self._store: Store | None = None
        self._lost: tuple[int, str] | None = None
        self._outcomes: SimpleQueue[Outcome] = SimpleQueue()

    @classmethod
    def open(cls, rendezvous: Rendezvous, settings: Settings, backend: str = "") -> Self:
        """Open a group over the default process group, and initialise that first unless the process has one already, as
        under torchrun."""
        store = None if dist.is_initialized() else _init_process_group(rendezvous, settings, backend)
        group = cls(None, settings, owned=store is not None)
        group._store = store  # a store that is written in Python ends with its last reference
        if settings.keys:
            authenticate_all(group, settings.keys)
        return group

    def reduce_scatter(self, nodes: torch.Tensor, bounds: Sequence[int], order: Order | None = None) -> None:
        self._reduce(nodes, list(pairwise(bounds)), order)

    def all_gather(self, flat: torch.Tensor, bounds: Sequence[int]) -> None:
        self._gather(flat, bounds, flat.dtype)

    def all_reduce(self, nodes: torch.Tensor, order: Order | None = None) -> None:
        size = nodes.shape[-1]
        if size * nodes.element_size() <= SMALL_BYTES:
            self._reduce(nodes, [(0, size)] * self.world_size, order)
        else:
            bounds = shares(size, self.world_size)
            self.reduce_scatter(nodes, bounds, order)
            self._gather(first_row(nodes), bounds, self._wire_dtype(nodes))

    def _reduce(self, nodes: torch.Tensor, parts: Sequence[tuple[int, int]], order: Order | None) -> None:
        """Send every rank its part of this rank's rows, and add up all ranks' rows of this rank's part."""
        order = order or one_node_each(self.world_size)
        rows = rows_of(nodes, order, self.rank)
        dtype = self._wire_dtype(nodes)
        lo, hi = parts[self.rank]
        sends = [(peer, row[a:b].to(self.device, dtype)) for peer, (a, b) in enumerate(parts) for row in rows]
        leaves = [
            rows[row][lo:hi].to(self.device, dtype)
            if rank == self.rank
            else torch.empty(hi - lo, dtype=dtype, device=self.device)
            for rank, row in order.leaves
        ]
        receives = [(rank, leaf) for (rank, _), leaf in zip(order.leaves, leaves, strict=True)]
        self._exchange(sends, receives, "reduce-scatter")
        order.add_up(leaves)
        first_row(nodes)[lo:hi].copy_(leaves[0])

    def abort(self, rank: int, detail: str) -> None:
        self._lost = rank, detail
        self._outcomes.put((rank, None))

    def leave(self) -> None:
        if self._owned:
            self._owned = False
            dist.destroy_process_group(self.process_group)

    def _gather(self, flat: torch.Tensor, bounds: Sequence[int], dtype: torch.dtype) -> None:
        mine = flat[bounds[self.rank] : bounds[self.rank + 1]].to(self.device, dtype)
        in_place = flat.dtype == dtype and flat.device == self.device
        parts = [flat[lo:hi] for lo, hi in pairwise(bounds)]
        buffers = parts if in_place else [torch.empty_like(p, dtype=dtype, device=self.device) for p in parts]
        self._exchange([(peer, mine) for peer in range(self.world_size)], list(enumerate(buffers)), "all-gather")
        if not in_place:
            for rank, (part, buffer) in enumerate(zip(parts, buffers, strict=True)):
                if rank != self.rank:
                    part.copy_(buffer)

    def _exchange(self, sends: list[Transfer], receives: list[Transfer], operation: str) -> None:
        """Do all transfers at the same time, except empty ones and those to this rank itself."""
        self.bytes_sent += sum(tensor.nbytes for peer, tensor in sends if peer != self.rank)
        ops = [
            (peer, dist.P2POp(way, tensor, self._peers[peer], self.process_group))
            for way, transfers in ((dist.irecv, receives), (dist.isend, sends))
            for peer, tensor in transfers
            if peer != self.rank and tensor.numel()
        ]
        if self.device.type == "cuda":
            self._exchange_joined([op for _, op in ops], operation)
        else:
            self._exchange_by_peer(ops, operation)

    def _exchange_joined(self, ops: list[dist.P2POp], operation: str) -> None:
        """NCCL merges the transfers into one and does not report which of them failed."""
        started = time.monotonic()
        try:
            works = dist.batch_isend_irecv(ops) if ops else []
        except RuntimeError as error:
            raise _failure(error, SOMEONE, operation, started) from error
        for work in works:
            self._wait_for(work, SOMEONE, operation, started)

    def _exchange_by_peer(self, ops: list[tuple[int, dist.P2POp]], operation: str) -> None:
        """Wait for all peers at the same time: when one is lost, another that knows of it may have stopped sending.

        After a failure the other transfers get a moment to finish, so that their peers find out by themselves which
        rank was lost."""
        started = time.monotonic()
        outcomes = self._outcomes = SimpleQueue()
        begun: dict[int, list[dist.Work | None]] = {}
        for peer, op in ops:
            try:
                begun.setdefault(peer, []).append(op.op(op.tensor, op.peer, self.process_group))
            except RuntimeError as error:
                outcomes.put((peer, _failure(error, peer, operation, started)))

        def wait(peer: int, works: list[dist.Work | None]) -> None:
            failure = None
            try:
                for work in works:
                    self._wait_for(work, peer, operation, started)
            except Exception as error:
                failure = error
            outcomes.put((peer, failure))

        if self._lost:
            outcomes.put((self._lost[0], None))
        for peer, works in begun.items():
            if len(begun) == 1 and _complete_soon(works):
                wait(peer, works)
            else:
                threading.Thread(target=wait, args=(peer, works), daemon=True).start()
        self._collect(outcomes, set(begun), operation, started)

    def _collect(self, outcomes: SimpleQueue[Outcome], silent: set[int], operation: str, started: float) -> None:
        """Wait for every peer; raise the first failure, or a timeout that names a silent peer.

        A peer that has left because another was lost fails as well, and perhaps first. So with more than two ranks,
        `abort` gets a moment to name the lost one."""
        failure: Exception | None = None
        until = started + self.timeout
        while silent or (failure and self.world_size > 2):
            try:
                peer, error = outcomes.get(timeout=max(0.0, until - time.monotonic()))
            except Empty:
                break
            if self._lost:
                raise PeerLost(self._lost[0], operation, time.monotonic() - started, self._lost[1])
            silent.discard(peer)
            if error and not failure:
                failure, until = error, time.monotonic() + GRACE_SECONDS
        seconds = time.monotonic() - started
        # A peer that closes its connection at the deadline timed out waiting for the one still silent.
        if silent and seconds >= self.timeout:
            raise GroupTimeout(min(self._exclude_waiting(silent)), operation, seconds)
        if failure:
            raise failure

    def _exclude_waiting(self, silent: set[int]) -> set[int]:
        """The silent peers, except those whose timeout is in the store: they wait for the lost rank themselves."""
        until = time.monotonic() + GRACE_SECONDS
        waiting: set[int] = set()
        with contextlib.suppress(RuntimeError):  # the store may be lost as well
            store = dist.distributed_c10d._get_default_store()
            store.set(f"andon/waits/{self.rank}", "")
            while len(silent - waiting) > 1 and time.monotonic() < until:
                waiting = {peer for peer in silent if store.check([f"andon/waits/{peer}"])}
                time.sleep(0.01)
        return silent - waiting or silent

    def _wait_for(self, work: dist.Work | None, peer: int, operation: str, started: float) -> None:
        assert work is not None, f"rank {self.rank} is not part of the process group"
        # A timeout within Gloo closes the connections to all ranks, so this one must be shorter.
        left = max(0.001, started + self.timeout + GRACE_SECONDS - time.monotonic())
        try:
            work.wait(timedelta(seconds=left))
        except RuntimeError as error:
            raise _failure(error, peer, operation, started) from error

    def _wire_dtype(self, nodes: torch.Tensor) -> torch.dtype:
        return torch.bfloat16 if self.wire == "bf16" and nodes.dtype == torch.float32 else nodes.dtype


def authenticate_all(group: Group, keys: LinkKeys) -> None:
    """Every rank proves to every other, through the group, that it knows their key: torch.distributed does not ask."""
    rank, size = group.rank, group.world_size
    nonces = group.all_gather_bytes(secrets.token_bytes(32))

    def proof(prover: int, other: int, key: bytes) -> bytes:
        text = b"andon torch %d %d %d " % (keys.generation, prover, other) + nonces[prover] + nonces[other]
        return hmac.digest(key, text, "sha256")

    mine = b"".join(bytes(32) if peer == rank else proof(rank, peer, keys.of(peer)) for peer in range(size))
    for peer, proofs in enumerate(group.all_gather_bytes(mine)):
        if peer == rank:
            continue
        expected = proof(peer, rank, keys.of(peer))
        if not hmac.compare_digest(proofs[32 * rank : 32 * rank + 32], expected):
            raise ProtocolError(f"rank {peer} does not know the run's token")


def _init_process_group(rendezvous: Rendezvous, settings: Settings, backend: str) -> Store:
    """Initialise the default process group; returns its store."""
    if settings.tls:
        cause = "torch's Gloo is built without TLS"
        raise UserError("Transport 'torch' cannot encrypt", cause, "Use --group.transport ring or star")
    wait = timedelta(seconds=settings.timeout)
    store = settings.store or _open_store(rendezvous, settings.host, wait)
    rank, size, started = rendezvous.rank, rendezvous.world_size, time.monotonic()
    try:
        backend = backend or gloo_at(settings.host)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=wait)
    except RuntimeError as error:
        raise _failure(error, SOMEONE, "connecting through torch.distributed", started) from error
    return store


def _open_store(rendezvous: Rendezvous, host: str, wait: timedelta) -> Store:
    """Open a store on rank 0, at the run's address only: torch by default listens at every address."""
    listener = listen((host, 0), backlog=rendezvous.world_size + 8) if rendezvous.rank == 0 else None
    port = listener.getsockname()[1] if listener else 0
    address = rendezvous.exchange("torch store", f"{host} {port}")[0].split()
    handle = listener.detach() if listener else None
    started = time.monotonic()
    try:
        return TCPStore(
            address[0],
            int(address[1]),
            is_master=handle is not None,
            timeout=wait,
            wait_for_workers=False,
            master_listen_fd=handle,
        )
    except RuntimeError as error:
        raise _failure(error, 0, "connecting to torch's store", started) from error


def _complete_soon(works: Sequence[dist.Work | None]) -> bool:
    """Whether transfers complete within POLL_SECONDS, so that no thread has to wait for them."""
    until = time.monotonic() + POLL_SECONDS
    while not all(work is None or work.is_completed() for work in works):
        if time.monotonic() > until:
            return False
        os.sched_yield()
    return True


def _failure(error: RuntimeError, peer: int, operation: str, started: float) -> GroupTimeout | PeerLost:
    # Gloo's message, without its source file and its advice.
    text = re.sub(r"^\[[^\]]*\] ", "", str(error).splitlines()[0]).split(". This is typically")[0]
    kind = GroupTimeout if "time" in text.lower() and "out" in text.lower() else PeerLost
    return kind(peer, operation, time.monotonic() - started, text)
