"""The probe: digests of small fixed computations. Machines whose probes are equal compute the same bits.

Each operation has a separate digest, so that a difference can be named. The inputs come from integer arithmetic and
are the same everywhere.
"""

from collections.abc import Callable, Mapping
from typing import Final

import torch
import torch.nn.functional as F
from blake3 import blake3
from torch import Tensor
from torch.optim.adamw import adamw

from andon.errors import UserError
from andon.integrity.fingerprint import blame_by_majority
from andon.model.loss import product_f32
from andon.transport.base import Group

Probe = Mapping[str, str]
"""The digest of each operation, by its name."""
DIGEST_BYTES: Final = 8


def take_probe(device: torch.device) -> Probe:
    """Compute every operation on a device, and its digest."""
    operations = {**OPERATIONS, **ON_GPU} if device.type == "cuda" else OPERATIONS
    return {name: _digest(operation(device)) for name, operation in operations.items()}


def differing(mine: Probe, other: Probe) -> list[str]:
    """The operations in both probes whose digests differ."""
    return [name for name, digest in mine.items() if other.get(name, digest) != digest]


def compare_probes(group: Group, mine: Probe, mixed: bool) -> str:
    """Name the operations that the ranks compute differently, and the rank; empty if all compute the same bits.

    Different bits are refused unless `mixed` allows them; then the group is marked as mixed."""
    everyone = group.all_gather_json(dict(mine))
    by_operation = {name: [each.get(name, "") for each in everyone] for each in everyone for name in each}
    differ = ((name, digests) for name, digests in by_operation.items() if len(set(digests)) > 1)
    found = "; ".join(f"{name} differs{blame_by_majority(digests)}" for name, digests in differ)
    if found and not mixed:
        raise UserError(
            f"The workers do not compute the same bits: {found}",
            "Their processors, their numerics or their versions of torch differ",
            "Use one version of torch and --numerics portable everywhere (AMD with Intel: --numerics compatible), "
            "or allow it: --group.mixed true",
        )
    group.mixed = bool(found)
    return found


def _numbers(device: torch.device, *shape: int, seed: int = 1) -> Tensor:
    """Pseudo-random numbers between -1 and 1, exact in f32."""
    count = torch.Size(shape).numel()
    mixed = (torch.arange(count, dtype=torch.int64) + seed) * 2654435761 % 4294967296
    return ((mixed // 256).float() / 2**23 - 1).view(shape).to(device)


def _digest(tensors: list[Tensor]) -> str:
    found = blake3()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest(DIGEST_BYTES)


def _with_gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """The result, and the gradients of all inputs."""
    leaves = [each.requires_grad_() for each in inputs]
    result = function(*leaves)
    # Weights multiply the result here, because `grad_outputs` would load torch's symbolic shapes: 35 MB.
    weighted = result * _numbers(result.device, *result.shape, seed=99)
    return [result, *torch.autograd.grad(weighted.sum(), leaves)]


def _products(device: torch.device, *shapes: tuple[int, int, int]) -> list[Tensor]:
    found = []
    for rows, inner, columns in shapes:
        found += _with_gradients(torch.matmul, _numbers(device, rows, inner), _numbers(device, inner, columns, seed=7))
    return found


def _matrix_products(device: torch.device) -> list[Tensor]:
    """The shapes of a small transformer's layers: libraries choose a kernel by shape."""
    found = _products(device, (512, 128, 384), (96, 160, 33), (8, 512, 1024))
    if device.type == "cuda":  # as compiled blocks multiply
        gradient, inputs = _numbers(device, 512, 384).bfloat16(), _numbers(device, 512, 128, seed=7).bfloat16()
        found.append(product_f32(gradient.t(), inputs))
        left, right = _numbers(device, 2048, 1024).bfloat16(), _numbers(device, 1024, 4096, seed=7).bfloat16()
        found.append(left @ right)
    return found


def _vendor_products(device: torch.device) -> list[Tensor]:
    """Shapes for which MKL adds in a different order on AMD than on Intel: on AMD it ignores `MKL_CBWR`."""
    return _products(device, (32, 1024, 4), (64, 256, 64), (3, 100, 64))


def _attention(device: torch.device) -> list[Tensor]:
    queries, keys, values = (_numbers(device, 2, 4, 64, 32, seed=seed) for seed in (1, 2, 3))
    return _with_gradients(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), queries, keys, values
    )


def _normalization(device: torch.device) -> list[Tensor]:
    x, scale = _numbers(device, 64, 384), _numbers(device, 384, seed=5)
    rms = _with_gradients(lambda x, scale: F.rms_norm(x, (384,), scale), x.clone(), scale.clone())
    return rms + _with_gradients(lambda x, scale: F.layer_norm(x, (384,), scale), x, scale)


def _exponentials(device: torch.device) -> list[Tensor]:
    x = 8 * _numbers(device, 64, 257)
    entropy = _with_gradients(lambda x: F.cross_entropy(x, torch.arange(64, device=x.device), reduction="none"), x)
    return [*entropy, x.exp(), F.silu(x), x.cos(), x.sin(), x.tanh(), x.abs().log1p()]


def _sums(device: torch.device) -> list[Tensor]:
    x = _numbers(device, 16, 1024)
    return [torch.linalg.vector_norm(x, dim=1), x.sum(), x.mean(0), x.double().sum(1)]


def _adamw_update(device: torch.device) -> list[Tensor]:
    weights, gradients, first, second = (_numbers(device, 4099, seed=seed) for seed in (1, 2, 3, 4))
    second.abs_()
    if device.type == "cuda":
        from andon.optim.adamw_kernel import update  # needs triton

        options = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
        update(weights, gradients, (first, second), None, torch.ones((), device=device), None, 4, options)
        return [weights, first, second]
    adamw(
        [weights],
        [gradients],
        [first],
        [second],
        [],
        [torch.tensor(4.0, device=device)],
        fused=True,
        amsgrad=False,
        beta1=0.9,
        beta2=0.95,
        lr=3e-4,
        weight_decay=0.1,
        eps=1e-8,
        maximize=False,
    )
    return [weights, first, second]


def _convolution(device: torch.device) -> list[Tensor]:
    images, filters = _numbers(device, 4, 8, 16, 16), _numbers(device, 16, 8, 3, 3, seed=3)
    return _with_gradients(lambda x, f: F.max_pool2d(F.conv2d(x, f, padding=1), 2), images, filters)


def _kind(device: torch.device) -> list[Tensor]:
    """What determines the kernels of a GPU, also those of compiled models, which take long to compile for a probe."""
    import triton

    card = torch.cuda.get_device_properties(device)
    software = torch.__version__, torch.version.cuda, triton.__version__
    text = f"{card.name} {card.major}.{card.minor} {card.multi_processor_count} {software}"
    return [torch.tensor(list(text.encode()), dtype=torch.uint8)]


OPERATIONS: Final[Mapping[str, Callable[[torch.device], list[Tensor]]]] = {
    "the matrix product": _matrix_products,
    "the matrix product of small sizes": _vendor_products,
    "attention": _attention,
    "normalization": _normalization,
    "the exponential": _exponentials,
    "the sum": _sums,
    "AdamW": _adamw_update,
    "convolution": _convolution,
}
ON_GPU: Final[Mapping[str, Callable[[torch.device], list[Tensor]]]] = {
    "the kind of GPU, or the version of torch or triton": _kind
}
