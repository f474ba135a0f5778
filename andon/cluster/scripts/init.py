"""`andon.init`: opens the group of a process that runs a user's script."""

import atexit
import os
import random
import signal
import sys
import threading
import warnings
from types import TracebackType

import numpy as np
import torch
import torch.distributed as dist

from andon.cluster.scripts.group import ScriptGroup
from andon.cluster.scripts.run import NUMERICS, join_launcher, show_without_traceback
from andon.cluster.session import make_torch_deterministic, use_gpu
from andon.cluster.signals import save_on_signal
from andon.errors import UserError
from andon.integrity.probe import compare_probes, take_probe
from andon.numerics import KERNELS, Numerics, choose_kernels
from andon.transport.base import Group, Settings
from andon.transport.local import LocalGroup
from andon.transport.registry import fastest_here, open_group
from andon.transport.rows import Wire
from andon.transport.torch_backend import StoreRendezvous, init_ranks
from andon.transport.torch_dist import TorchGroup


def init(
    timeout: float = 60.0,
    seed: int = 0,
    numerics: Numerics | None = None,
    threads: int = 1,
    wire: Wire = "f32",
    mixed: bool = False,
) -> Group:
    """Open the group of this process; close it at the end.

    The other ranks are the workers of `andon run`, torchrun or SLURM; without them the process is alone. On one machine
    the ranks exchange through shared memory. On several machines, and under torchrun where each rank has a GPU of its
    own, they exchange through torch.distributed. The ranks of a machine take its GPUs in turn: each one's is the
    current device. torch is made deterministic, with `threads` compute threads per worker, and all random generators
    start from `seed`.

    `timeout` is the number of seconds that a rank may make no progress. `numerics` is the setting of `andon run`, or
    portable. `wire` is the type of gradients on the wire. `mixed` allows machines that compute different bits."""
    if warning := choose_kernels(numerics or _chosen_by_launcher()):
        warnings.warn(warning, RuntimeWarning, stacklevel=2)
    make_torch_deterministic(threads)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    group = _open(Settings(timeout, wire))
    if found := compare_probes(group, take_probe(_device()), mixed):
        warnings.warn(f"Unequal machines: {found}. Each weight is updated by one of them", RuntimeWarning, stacklevel=2)
    atexit.register(_close_at_exit, group)
    return group


def _device() -> torch.device:
    """The current GPU, or the CPU of a machine without one."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _chosen_by_launcher() -> Numerics:
    """The numerics of `andon run`, or portable."""
    chosen = os.environ.get(NUMERICS, "portable")
    for numerics in KERNELS:
        if numerics == chosen:
            return numerics
    raise UserError(f"{NUMERICS}={chosen} is not a setting", f"Settings: {', '.join(KERNELS)}", f"unset {NUMERICS}")


def _open(settings: Settings) -> Group:
    if found := join_launcher():
        client, joins, edited = found
        if torch.cuda.is_available():
            use_gpu(client.local_rank)
        return ScriptGroup(client, settings, joins, edited)
    _read_slurm()
    if torch.cuda.is_available():
        use_gpu(int(os.environ.get("LOCAL_RANK", "0")))
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    group = LocalGroup(settings.wire) if alone else _open_torchrun(settings)
    _behave_as_under_andon_run(group)
    return group


def _behave_as_under_andon_run(group: Group) -> None:
    """Let Ctrl-C end the script after a step, which is saved, and show errors of the user without a traceback."""
    in_a_shell = hasattr(sys, "ps1") or threading.current_thread() is not threading.main_thread()
    defaults = (signal.default_int_handler, signal.SIG_IGN)  # a job in the background ignores Ctrl-C
    if in_a_shell or signal.getsignal(signal.SIGINT) not in defaults:
        return
    stop, before = threading.Event(), sys.excepthook

    def request_stop() -> None:
        stop.set()
        if group.rank == 0:
            print("Stopping after this step. Ctrl-C again quits at once.", file=sys.stderr, flush=True)

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if show_without_traceback(error) is None:
            before(kind, error, trace)

    group.stop_wanted = stop.is_set
    save_on_signal(request_stop, signal.default_int_handler)
    sys.excepthook = show


def _open_torchrun(settings: Settings) -> Group:
    """Open the group of the ranks that torchrun or SLURM has started."""
    opened_here = not dist.is_initialized()
    if opened_here:
        init_ranks("gloo", settings.timeout, _device())
    size, here = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if dist.get_backend() == "nccl" or here != size or fastest_here(size) == "torch":
        return TorchGroup(None, settings, owned=opened_here)
    store = dist.distributed_c10d._get_default_store()
    return open_group(fastest_here(size), StoreRendezvous(store, dist.get_rank(), size, settings.timeout), settings)


def _read_slurm() -> None:
    """Set the variables of torchrun from those of SLURM, if MASTER_ADDR names the address of rank 0."""
    names = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}
    if "MASTER_ADDR" in os.environ and "WORLD_SIZE" not in os.environ and "SLURM_PROCID" in os.environ:
        os.environ.update({name: os.environ[slurm] for name, slurm in names.items() if slurm in os.environ})


def _close_at_exit(group: Group) -> None:
    """Close the group of a script that did not; after an error do not wait for other ranks, which may be gone."""
    if getattr(sys, "last_value", None) is None or group.world_size == 1:
        group.close()
