"""On a GPU: one answer, the cord, saves, and numbers that nobody waits for. `tests/gpu.sh` runs these."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import andon
from andon.checkpoint.disk.manifest import read as manifest
from andon.engine.loader import Loader
from andon.engine.reading import Reading
from andon.integrity.probe import ON_GPU, OPERATIONS, take_probe
from andon.model.loss import loss_of_chunk
from andon.transport.local import LocalGroup
from tests.kit.runs import andon as run
from tests.kit.runs import events, summary
from tests.membership.test_goes_on import run_of, steps_after, stop, wait_for, wait_for_newest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: tests/gpu.sh on a machine that has one"),
]

SMALL = [
    *("--model.vocab=300", "--model.hidden=128", "--model.layers=2", "--model.heads=2", "--model.kv_heads=1"),
    *("--model.intermediate=256", "--train.context=128", "--train.micro_batch=2", "--train.slots=6"),
    *("--train.steps=12", "--data.stories=300", "--eval.windows=8", "--eval.stories=0", "--eval.sample_every=0"),
    *("--checkpoint.every=4", "--device=cuda"),
]


def train(folder: Path, *arguments: str, name: str = "run", code: int = 0) -> dict[str, Any]:
    """A small run on the GPU: its summary, or its halt."""
    found, output = run("train", *SMALL, f"--run.dir={name}", *arguments, cwd=folder, timeout=300, executed=True)
    assert found == code, output
    return summary(folder / name) if code == 0 else {"output": output}


@pytest.mark.parametrize(
    "options",
    [(), *((f"--train.{each}",) for each in ("weights=bf16", "compile=false", "precision=f32", "context=100"))],
    ids=str,
)
def test_workers_that_share_a_gpu_give_the_answer_of_one(tmp_path: Path, options: tuple[str, ...]) -> None:
    answers = {
        train(tmp_path, *options, *how, name=f"run{number}")["weights_blake3"]
        for number, how in enumerate(
            (
                ("--workers=1",),
                ("--workers=2",),
                ("--workers=3", "--zero.policy=even"),
                ("--workers=3", "--group.transport=star"),
            )
        )
    }
    assert len(answers) == 1


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_gradient_is_named_and_touches_no_weight(tmp_path: Path, workers: int) -> None:
    """The halt saves the last committed step; from there the run ends as if nothing had been."""
    rank, slot = workers - 1, 6 // workers * (workers - 1)
    fault = f"--fault=nan:rank={rank},step=7,parameter=lm_head.weight"
    train(tmp_path, f"--workers={workers}", fault, code=3)
    halt = json.loads((tmp_path / "run" / "halt.json").read_text())
    assert (halt["step"], halt["committed"], halt["sound"]) == (7, 6, True)
    (finding,) = halt["findings"]
    assert (finding["rank"], finding["slot"], finding["parameter"]) == (rank, slot, "lm_head.weight")
    assert len(finding["samples"]) == 2
    assert (tmp_path / "run" / "checkpoints" / "checkpoint-6").is_dir()
    after = train(tmp_path, f"--workers={workers}")
    assert after["weights_blake3"] == train(tmp_path, "--workers=1", name="other")["weights_blake3"]


def test_a_bad_step_is_skipped_alike_with_and_without_an_exchange(tmp_path: Path) -> None:
    fault = ("--on_nonfinite=skip", "--fault=nan:rank=0,step=5")
    one = train(tmp_path, "--workers=1", *fault, name="one")
    two = train(tmp_path, "--workers=2", *fault, name="two")
    assert one["skipped"] == two["skipped"] == 1
    assert one["weights_blake3"] == two["weights_blake3"]


def test_a_killed_run_resumes_with_another_number_of_workers_and_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole = train(tmp_path, "--workers=1", name="whole")
    train(tmp_path, "--workers=1", "--restarts=0", "--fault=die:rank=0,step=10", code=1)
    assert train(tmp_path, "--workers=3")["weights_blake3"] == whole["weights_blake3"]


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_run_goes_on_without_a_killed_worker_and_ends_with_the_same_bits(tmp_path: Path, replicas: int) -> None:
    whole = train(tmp_path, "--workers=1", name="whole")
    options = ("--workers=2", "--zero.policy=even", f"--zero.replicas={replicas}")
    found = train(tmp_path, *options, "--fault=die:rank=1,step=10")
    assert found["weights_blake3"] == whole["weights_blake3"]
    assert events(tmp_path / "run", "generation")


def test_a_run_that_grows_and_shrinks_gives_the_answer_of_one_worker(tmp_path: Path) -> None:
    """Alone, a worker updates ahead of the verdict; together with another it does not."""
    options = ("--workers=1", "--train.compile=false", "--optim.schedule=constant", "--optim.warmup=2")
    process = run_of(tmp_path, *SMALL, *options, "--train.steps=100000", executed=True)
    for workers in (2, 1):
        code, said = run("resize", "run", str(workers), cwd=tmp_path, executed=True)
        assert code == 0, said
        wait_for_newest(tmp_path / "run", process, workers)
        at = time.time()
        wait_for(process, lambda at=at: steps_after(tmp_path / "run", at)[3:])
    step, _ = stop(process, tmp_path / "run")
    train(tmp_path, *options, f"--train.steps={step}", name="whole")
    saved = (manifest(tmp_path / name / "checkpoints" / f"checkpoint-{step}") for name in ("run", "whole"))
    assert len({json.dumps(each.units) for each in saved}) == 1


def test_fine_tuning_gives_one_answer_and_counts_right_answers(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from tests.finetune.tuning import make_model, plots

    make_model(tmp_path / "llama")
    plots(tmp_path / "plots.jsonl", 120)
    options = [
        *("--device=cuda", "--train.slots=4", "--train.micro_batch=3", "--train.context=48", "--train.steps=6"),
        *("--optim.lr=0.01", "--eval.samples=12", "--eval.shown=1", "--eval.length=4", "--checkpoint.every=2"),
    ]
    found = []
    for workers in (1, 2):
        name = f"tuned{workers}"
        words = ["llama", "plots.jsonl", *options, f"--workers={workers}", f"--run.dir={name}"]
        code, output = run("finetune", *words, cwd=tmp_path, timeout=300, executed=True)
        assert code == 0, output
        answers = [(step["correct"], step["total"]) for step in events(tmp_path / name, "step")]
        found.append((summary(tmp_path / name)["weights_blake3"], answers))
    assert found[0] == found[1] and len(found[0][1]) == 6


def test_faster_kernels_train_with_all_checks(tmp_path: Path) -> None:
    fault = "--fault=nan:rank=0,step=3,parameter=lm_head.weight"
    assert train(tmp_path, "--deterministic=false", name="whole")["step"] == 12
    train(tmp_path, "--deterministic=false", fault, code=3)
    assert json.loads((tmp_path / "run" / "halt.json").read_text())["findings"][0]["parameter"] == "lm_head.weight"


def test_a_run_that_keeps_fewer_activations_learns_the_same(tmp_path: Path) -> None:
    kept = train(tmp_path, name="kept")
    again = train(tmp_path, "--train.activation_memory=0.5", name="again")
    assert abs(kept["loss"] - again["loss"]) < 0.05 * kept["loss"]


def test_steps_say_the_share_of_the_peak(tmp_path: Path) -> None:
    train(tmp_path)
    if any(part in torch.cuda.get_device_name() for part in ("H100", "H200", "A100")):
        shares = [step["mfu"] for step in events(tmp_path / "run", "step")]
        assert len(shares) == 12 and all(0 <= share < 1 for share in shares)


def test_a_profile_has_kernels_and_a_trace(tmp_path: Path) -> None:
    options = [each for each in SMALL if not each.startswith(("--data", "--eval", "--checkpoint"))]
    code, output = run("profile", *options, "--steps=2", "--json", cwd=tmp_path, executed=True)
    assert code == 0, output
    rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert any("attention_forward" in row["operation"] for row in rows)
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_a_save_is_measured_on_the_gpu(tmp_path: Path) -> None:
    options = ("--preset=tiny", "--tokens=512", "--repetitions=1", "--json")
    code, output = run("bench", "checkpoint", "--device=cuda", *options, cwd=tmp_path, timeout=300, executed=True)
    assert code == 0, output
    found = json.loads(output.splitlines()[-1])
    assert found["device"] == "cuda" and found["ranks"] == 1 and 0 < found["step_s"] < found["save_beside_training_s"]


def test_an_update_behind_a_closed_gate_changes_nothing() -> None:
    module = nn.Linear(64, 64).cuda()
    model = andon.DataParallel(module, LocalGroup(), slots=1)
    optimizer = andon.AdamW(model, lr=0.1)

    def step(scale: float) -> None:
        for _ in model.slots:
            model.backward(module(torch.ones(2, 64, device="cuda")).square().mean() * scale, count=2)
        optimizer.step(clip=1.0)

    def state() -> list[torch.Tensor]:
        return [each.clone() for each in (model.arena.weights, *optimizer.rule.state.values())]

    assert optimizer._updates_ahead
    step(1.0)
    before, updates = state(), optimizer.rule.updates
    with pytest.raises(andon.JidokaHalt):
        step(math.nan)
    assert all(torch.equal(*each) for each in zip(before, state(), strict=True)) and optimizer.rule.updates == updates
    step(1.0)
    assert not any(torch.equal(*each) for each in zip(before, state(), strict=True))
    model.close()


def test_buffers_that_forward_changes_are_noticed_without_waiting() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(8, 16)
    found = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(1)
        module = nn.Sequential(nn.Linear(16, 4), nn.BatchNorm1d(4)).to(device)
        model = andon.DataParallel(module, LocalGroup(), slots=2)
        optimizer = andon.AdamW(model, lr=0.1)
        for slot in model.slots:
            model.backward(model(inputs.to(device) * (slot + 1)).square().mean(), count=8)
        optimizer.step()
        found.append({name: buffer.cpu() for name, buffer in module.named_buffers()})
        model.close()
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name])
    assert int(found[1]["1.num_batches_tracked"]) == 1


class Numbered:
    """Batches that say which they are."""

    def __call__(self, step: int, slot: int) -> Any:
        array = torch.full((4, 9), 100 * step + slot).numpy()
        return array[:, :-1], array[:, 1:]

    def windows(self, step: int, slot: int) -> list[int]:
        return []

    def name(self, window: int) -> int:
        return window


def test_a_batch_that_was_prepared_is_the_one_that_is_asked_for() -> None:
    loader = Loader(Numbered(), torch.device("cuda"))
    loader.prepare(1, 2)
    assert int(loader(1, 2)[0][0, 0]) == 102
    loader.prepare(1, 3)
    assert int(loader(7, 1)[1][0, 0]) == 701, "another one than was prepared"
    loader.close()


def test_a_reading_waits_for_its_own_numbers() -> None:
    values = torch.arange(3, device="cuda", dtype=torch.float64)
    reading = Reading(values)
    values.fill_(9)
    assert reading.values() == [0.0, 1.0, 2.0]


def test_a_gradient_of_a_compiled_block_is_written_once_into_the_arena() -> None:
    from andon.model.gpu.compiled import compile_model
    from andon.model.llama import Llama
    from andon.model.shape import SHAPES

    model = Llama(SHAPES["tiny"])
    model.initialise(seed=1)
    model.to("cuda")
    model.compute = torch.bfloat16
    compile_model(model)
    tokens = torch.randint(model.shape.vocab, (2, model.shape.context), device="cuda")
    for _ in range(2):
        outs = {name: torch.empty_like(each) for name, each in model.named_parameters()}
        for name, each in model.named_parameters():
            each.grad, each.grad_out = None, outs[name]  # type: ignore[attr-defined]
        model(tokens, tokens).backward()
        for name, each in model.model.layers.named_parameters():
            if each.dim() == 2:
                assert each.grad is not None and each.grad.data_ptr() == outs[f"model.layers.{name}"].data_ptr(), name


@pytest.mark.parametrize(
    "batch, length, heads, kv_heads, size",
    [(2, 64, 2, 1, 64), (1, 1024, 4, 1, 64), (3, 192, 4, 4, 16), (1, 256, 6, 2, 32)],
)
def test_the_attention_kernels_compute_what_torch_computes(
    batch: int, length: int, heads: int, kv_heads: int, size: int
) -> None:
    from andon.model.gpu.attention import attend_by_kernels, attend_by_torch
    from andon.model.llama import rotations
    from andon.model.shape import Shape

    cos, sin = (each.cuda() for each in rotations(Shape(2, heads * size, 1, heads, kv_heads, 2, length)))
    torch.manual_seed(1)
    inputs = torch.randn(batch, length, heads + 2 * kv_heads, size, device="cuda").bfloat16()
    gradient = torch.randn(batch, length, heads, size, device="cuda").bfloat16()
    exact = inputs.double().requires_grad_()
    out = attend_by_torch(exact, cos.double(), sin.double(), kv_heads)
    wanted = (out, *torch.autograd.grad(out, exact, gradient.double()))
    runs = []
    for _ in range(3):
        mine = inputs.clone().requires_grad_()
        out = attend_by_kernels(mine, cos, sin, kv_heads)
        runs.append((out, *torch.autograd.grad(out, mine, gradient)))
    for one, other in zip(runs[0], wanted, strict=True):
        assert one.shape == other.shape and (one - other).norm() < 0.01 * other.norm()
    assert all(torch.equal(a, b) for each in runs[1:] for a, b in zip(runs[0], each, strict=True)), "the same bits"
    for head in (0, heads, heads + kv_heads):  # a query, a key, a value
        bad = inputs.clone()
        bad[-1, length // 2, head] = math.nan
        bad.requires_grad_()
        out = attend_by_kernels(bad, cos, sin, kv_heads)
        assert out[-1, length // 2].isnan().any() and torch.autograd.grad(out, bad, gradient)[0].isnan().any()


def test_the_probe_of_a_gpu_is_the_same_every_time_and_includes_the_kind_of_gpu() -> None:
    device = torch.device("cuda", 0)
    probe = take_probe(device)
    assert probe == take_probe(device) and list(probe) == [*OPERATIONS, *ON_GPU]


@pytest.mark.parametrize("rows, width", [(1, 1), (7, 1500), (64, 4096)])
def test_the_gates_kernel_computes_what_the_cpu_computes(rows: int, width: int) -> None:
    import andon.model.gpu.products  # noqa: F401

    generator = torch.Generator().manual_seed(1)
    both, gradient = (torch.randn(rows, n, generator=generator).bfloat16() for n in (2 * width, width))
    wanted = torch.ops.andon.gated_backward(both, gradient, True)
    for again in (True, False):
        found = torch.ops.andon.gated_backward(both.cuda(), gradient.cuda(), again)
        torch.testing.assert_close(found[0].cpu(), wanted[0], rtol=0.01, atol=0.001)
        if again:
            torch.testing.assert_close(found[1].cpu(), wanted[1], rtol=0.01, atol=0.001)


@pytest.mark.parametrize("vocab", [2, 1000, 8192, 40_000])
def test_the_loss_on_a_gpu_is_what_the_cpu_computes(vocab: int) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(rows, 64, generator=generator).bfloat16() for rows in (17, vocab))
    targets = torch.randint(vocab, (17,), generator=generator)
    targets[3] = -100
    wanted = loss_of_chunk(x, weight, targets)
    found = loss_of_chunk(x.cuda(), weight.cuda(), targets.cuda())
    torch.testing.assert_close(found[0].cpu(), wanted[0], rtol=0.01, atol=0.01)
    torch.testing.assert_close(found[1].cpu(), wanted[1], rtol=0.02, atol=0.002)
    assert not found[1][3].any()
    x[5, 0] = math.nan
    loss, gradient = loss_of_chunk(x.cuda(), weight.cuda(), targets.cuda())
    assert loss.isnan() and gradient[5].isnan().all() and gradient[6:].isfinite().all()
    for wrong in (-1, vocab):
        assert loss_of_chunk(x[:1].cuda(), weight.cuda(), torch.tensor([wrong]).cuda())[0].isnan()


@pytest.mark.parametrize("size", [1, 1000, 100_000])
def test_the_update_on_a_gpu_is_adamw(size: int) -> None:
    from andon.optim.adamw_kernel import update

    torch.manual_seed(1)
    weights = torch.randn(size, device="cuda")
    first, second, gradients = torch.zeros_like(weights), torch.zeros_like(weights), torch.empty_like(weights)
    plain = weights.clone().requires_grad_()
    options: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    oracle = torch.optim.AdamW([plain], foreach=False, **options)
    rounded, divisor = weights.bfloat16(), torch.full((), 3.0, device="cuda")
    for step in range(1, 6):
        plain.grad = torch.randn_like(weights)
        gradients.copy_(plain.grad * 3)
        oracle.step()
        update(weights, gradients, (first, second), rounded, divisor, torch.zeros((), device="cuda"), step, options)
        torch.testing.assert_close(weights, plain.detach(), rtol=1e-5, atol=1e-6)
        assert torch.equal(rounded, weights.bfloat16())
        torch.testing.assert_close(gradients, plain.grad)
    sums = gradients.clone()
    update(weights, gradients, (first, second), None, divisor, None, 6, options, keeps_gradients=False)
    plain.grad = sums / 3
    oracle.step()
    torch.testing.assert_close(weights, plain.detach(), rtol=1e-5, atol=1e-6)
    assert torch.equal(gradients, sums)
    before = [each.clone() for each in (weights, gradients, first, second)]
    update(weights, gradients, (first, second), rounded, divisor, torch.ones((), device="cuda"), 7, options)
    assert all(torch.equal(a, b) for a, b in zip(before, (weights, gradients, first, second), strict=True))
