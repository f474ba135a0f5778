"""A small CNN with BatchNorm and dropout learns which quarter of a noisy image holds a bright square.

python examples/cnn.py                        one worker
andon run --workers 2 examples/cnn.py         two workers, with the same final weights bit for bit
"""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import andon

group = andon.init(seed=1)
body = [nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.1)]
model = andon.DataParallel(nn.Sequential(*body, nn.Flatten(), nn.Linear(16 * 64, 4)), group, slots=8)
optimizer = andon.AdamW(model, lr=3e-3, zero="off")  # every worker holds the whole optimizer state


def batch(step: int, slot: int) -> tuple[Tensor, Tensor]:
    quarter = torch.randint(4, (32,))  # Andon seeds the generators from (step, slot)
    squares = F.one_hot(quarter, 4).view(32, 1, 2, 2).float().repeat_interleave(8, 2).repeat_interleave(8, 3)
    return squares + 4 * torch.randn(32, 1, 16, 16), quarter


for step in model.steps(0, int(sys.argv[1]) if len(sys.argv) > 1 else 60):  # continues if a worker is lost
    for slot in model.slots:
        x, y = batch(step, slot)
        model.backward(F.cross_entropy(model(x), y), count=len(y))
    loss = optimizer.step(clip=1.0).loss
if group.rank == 0:
    print(f"loss {loss:.4f}, weights {andon.digest(model)}")
group.close()
