"""`andon profile`: where the time of a step goes, as a Chrome trace and a table, on a CPU or a GPU.

It runs a few steps of a configuration on one worker with random tokens, so no corpus is needed. The table has the
kernels of the GPU, or the operations of the CPU if there is none; the phases of a step are times on the host.
"""

import os
import time
from pathlib import Path
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile

from andon.bench.kit.report import show
from andon.bench.ranks.train import RandomBatches
from andon.cluster.session import choose_device, make_torch_deterministic
from andon.config.schema import Config
from andon.engine.trainer import Trainer
from andon.run.build import allow_faster_kernels, optimizer_of, step_settings
from andon.run.pretraining import build_model
from andon.run.records.events import no_event
from andon.transport.local import LocalGroup

WARM_UP: Final = 3  # steps
NAME_WIDTH: Final = 70


def main(config: Config, steps: int, trace: Path, rows: int, as_json: bool) -> None:
    """Profile `steps` steps, write the trace and print the `rows` slowest operations."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler says when it starts and stops
    config = config.with_transport("local")
    make_torch_deterministic(config.threads)
    device = choose_device(config.device, 0, no_event)
    allow_faster_kernels(config, device)
    group = LocalGroup()
    tokens = config.train.micro_batch * config.train.context
    optimizer = optimizer_of(config, build_model(config, device), group, overlap_gather=False)
    trainer = Trainer(optimizer, RandomBatches(config.shape, tokens, config.seed), step_settings(config))
    for _ in range(WARM_UP):
        trainer.train_step()
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    phases: dict[str, float] = {}
    with profile(activities=activities) as profiler:
        began = time.perf_counter()
        for _ in range(steps):
            trainer.train_step()
            for name, milliseconds in trainer.model.phases.milliseconds.items():
                phases[name] = phases.get(name, 0.0) + milliseconds / steps
        if on_gpu:
            torch.cuda.synchronize()
        whole = 1e3 * (time.perf_counter() - began) / steps
    trace.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(trace))
    group.close()
    notes = [
        "Phases on the host: " + ", ".join(f"{name} {value:.1f} ms" for name, value in phases.items()),
        f"Trace: {trace} (open it in chrome://tracing or ui.perfetto.dev)",
    ]
    title = f"A step of {whole:.1f} ms, profiled, {device.type.upper()}"
    show(title, _operations(profiler, on_gpu, steps, whole)[:rows], as_json, notes)


def _operations(profiler: Any, on_gpu: bool, steps: int, whole: float) -> list[dict[str, Any]]:
    """Each kernel or operation, the slowest first."""
    found = []
    for each in profiler.key_averages():
        if (each.device_type.name == "CUDA") is on_gpu and not each.is_user_annotation:
            took = (each.self_device_time_total if on_gpu else each.self_cpu_time_total) / 1e3 / steps
            calls = each.count // steps
            name = each.key if len(each.key) <= NAME_WIDTH else each.key[: NAME_WIDTH - 1] + "…"
            found.append({"operation": name, "calls": calls, "ms_per_step": took, "percent": 100 * took / whole})
    return sorted(found, key=lambda row: -row["ms_per_step"])
