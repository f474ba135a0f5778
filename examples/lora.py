"""LoRA adapters on a frozen network learn a random linear map, with one of torch's learning-rate schedulers.

Only the adapters are trained, exchanged and saved; the frozen weights must be the same on every worker.

    andon run --workers 2 examples/lora.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

import andon

STEPS = 40


class LoRA(nn.Module):
    """A frozen linear layer plus a trained product of two thin matrices."""

    def __init__(self, frozen: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, frozen.in_features) / frozen.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(frozen.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + x @ self.down.T @ self.up.T


group = andon.init(seed=1)
target = nn.Linear(32, 8)
model = andon.DataParallel(nn.Sequential(LoRA(nn.Linear(32, 64)), nn.Tanh(), LoRA(nn.Linear(64, 8))), group, slots=4)
optimizer = andon.AdamW(model, lr=1e-2, weight_decay=0.0)
scheduler = OneCycleLR(optimizer, max_lr=2e-2, total_steps=STEPS)
for _ in range(STEPS):
    for _ in model.slots:
        x = torch.randn(16, 32)
        model.backward(F.mse_loss(model(x), target(x).detach()), count=len(x))
    loss = optimizer.step().loss
    scheduler.step()
if group.rank == 0:
    print(f"loss {loss:.4f}, lr {optimizer.lr:.2e}, weights {andon.digest(model)}")
group.close()
