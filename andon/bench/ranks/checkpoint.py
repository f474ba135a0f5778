"""One rank of the checkpoint benchmark: saves of Andon and PyTorch, in turn."""

import os
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from blake3 import blake3
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint.state_dict_saver import async_save

from andon.bench.kit.rank import join
from andon.bench.ranks.train import RandomBatches, initialised, make_optimizer, make_trainer, on_gpu
from andon.checkpoint.checkpointer import Checkpointer, RunFacts, SaveSettings
from andon.checkpoint.disk.format import CHUNK_BYTES
from andon.cluster.session import make_torch_deterministic
from andon.integrity.fingerprint import as_bytes
from andon.model.shape import SHAPES
from andon.optim.sharding import Zero
from andon.transport.registry import fastest_here, open_group

PLAIN_STEPS = 9
MOST_STEPS = 40  # while a save is written; then the loop waits for its end, which would count as stall


class Bench:
    """One rank: a model that trains, and its checkpointer."""

    def __init__(self, task: dict[str, Any]) -> None:
        self.group = open_group(fastest_here(task["ranks"]), join(task))
        self.is_rank_0, self.folder = self.group.rank == 0, Path(task["folder"])
        shape, self.gpu = SHAPES[task["preset"]], task["device"] == "cuda"
        optimizer = make_optimizer(on_gpu(shape) if self.gpu else initialised(shape), self.group, Zero("off"))
        facts = RunFacts(self.folder, state={}, files={})
        self.checkpointer = Checkpointer(optimizer, facts, SaveSettings(keep=1), self._on_event)
        batches = RandomBatches(shape, task["tokens"], seed=task["rank"])
        self.trainer = make_trainer(optimizer, batches, self.checkpointer)
        self.arena = optimizer.model.arena
        self.flats = [self.arena.weights, *optimizer.rule.state.values()]
        self.copies = [self._copy_on_host(flat) for flat in self.flats] if self.is_rank_0 else []
        self.bytes = sum(flat.nbytes for flat in self.flats)
        self.saves: list[dict[str, Any]] = []

    def _copy_on_host(self, flat: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(flat, device="cpu", pin_memory=self.gpu).copy_(flat)

    def _on_event(self, kind: str, **fields: Any) -> None:
        if kind == "save_failed":
            raise RuntimeError(fields["reason"])
        if kind == "checkpoint":
            self.saves.append(fields)

    def step(self, first: Callable[[], object] = lambda: None) -> float:
        """Do something first, and one training step; returns the seconds of both."""
        started = time.perf_counter()
        first()
        self.trainer.train_step()
        if self.gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - started

    def timed(self, work: Callable[[], object]) -> float:
        """Let rank 0 do a work while the others wait; returns its seconds."""
        self.group.barrier()
        started = time.perf_counter()
        if self.is_rank_0:
            work()
        seconds = time.perf_counter() - started
        self.group.barrier()
        return seconds

    def rank_0_is(self, done: bool) -> bool:
        """Whether rank 0 passed True; every rank gets the same answer."""
        return self.group.all_gather_bytes(b"1" if done else b"")[0] == b"1"

    def copy(self) -> None:
        """Copy the state once, to the host's memory."""
        for flat, copy in zip(self.flats, self.copies, strict=True):
            copy.copy_(flat)

    def write(self) -> None:
        """Write the bytes of the state plainly, then fsync, as dd does."""
        path = self.folder / "plain"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for copy in self.copies:
            data = as_bytes(copy)
            for start in range(0, len(data), CHUNK_BYTES):
                os.write(descriptor, data[start : start + CHUNK_BYTES])
        os.fsync(descriptor)
        os.close(descriptor)
        path.unlink()

    def save_in_background(self) -> tuple[float, float, float, float]:
        """Save while training. Returns seconds: stall, step with the snapshot, median step while writing, the save."""
        before = len(self.saves)
        with_snapshot = self.step(lambda: self.checkpointer.save(self.trainer.progress.step))
        writing: list[float] = []
        while not self.rank_0_is(len(self.saves) > before) and len(writing) < MOST_STEPS:
            writing.append(self.step())
        self.checkpointer.finish()
        save = self.saves[-1]
        stall = save["stall_ms"] / 1e3
        return stall, with_snapshot, statistics.median(writing or [with_snapshot]), save["seconds"]

    def async_save_in_background(self) -> tuple[float, float]:
        """Save with async_save on rank 0 while training. Returns seconds: stall, median step while it writes."""
        folder = self.folder / "async_save"
        futures: list[Future[Any]] = []

        def save() -> None:
            views = self.arena.layout.views
            state = {
                f"{number}.{name}": view for number, flat in enumerate(self.flats) for name, view in views(flat).items()
            }
            future = async_save(state, checkpoint_id=folder, process_group=dist.group.WORLD)
            assert isinstance(future, Future)
            futures.append(future)

        stall = self.timed(save)
        steps = [self.step()]
        while not self.rank_0_is(all(future.done() for future in futures)) and len(steps) < MOST_STEPS:
            steps.append(self.step())
        self.timed(lambda: [future.result() for future in futures])
        self.timed(lambda: shutil.rmtree(folder))
        return stall, statistics.median(steps)

    def round(self) -> dict[str, float]:
        """Measure everything once."""
        found: dict[str, float] = {"bytes": self.bytes}
        found["step"] = statistics.median(self.step() for _ in range(PLAIN_STEPS))
        found["copy"] = self.timed(self.copy)
        save = self.save_in_background()
        found["stall"], found["step_snapshot"], found["step_writing"], found["save"] = save
        found["async_stall"], found["step_async"] = self.async_save_in_background()
        found["dd"] = self.timed(self.write)
        self.step()
        self.checkpointer.save(self.trainer.progress.step, wait=True)
        found["idle_save"] = self.saves[-1]["seconds"]
        seconds = self.timed(lambda: blake3(as_bytes(self.copies[0])).digest())
        found["hash_gb_s"] = self.copies[0].nbytes / seconds / 1e9 if self.is_rank_0 else 0.0
        return found


def main(task: dict[str, Any]) -> dict[Any, Any]:
    """Measure; returns the figures of each round."""
    make_torch_deterministic(threads=1)
    bench = Bench(task)
    if bench.is_rank_0:
        dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    bench.step()
    bench.round()  # warm-up: the first save of each kind allocates its buffers
    results: dict[str, list[float]] = defaultdict(list)
    for _ in range(task["repetitions"]):
        for name, value in bench.round().items():
            results[name].append(value)
    if bench.is_rank_0:
        dist.destroy_process_group()
    bench.trainer.close()
    bench.group.close()
    return results
