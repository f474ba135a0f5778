"""Save every ten steps, and resume from the newest good checkpoint after a Ctrl-C or kill -9, with any worker count.

andon run --workers 2 examples/resume.py runs/mine
andon run --workers 3 examples/resume.py runs/mine     continues where the first run stopped
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import andon

folder = sys.argv[1] if len(sys.argv) > 1 else "runs/mine"
steps = int(sys.argv[2]) if len(sys.argv) > 2 else 100

group = andon.init(seed=1)
net = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 64))
model = andon.DataParallel(net, group, slots=6)
optimizer = andon.AdamW(model, lr=3e-3)
scheduler = CosineAnnealingLR(optimizer, T_max=steps)
start = andon.load(folder, model, optimizer, scheduler)
if group.rank == 0 and start:
    print(f"continuing with step {start}", flush=True)
for step in range(start, steps):
    for _ in model.slots:
        x = torch.randn(32, 64)
        model.backward(F.mse_loss(model(x), x.flip(1)), count=len(x))
    totals = optimizer.step(clip=1.0)
    scheduler.step()
    if step % 10 == 9:
        andon.save(folder, model, optimizer, step)
if group.rank == 0:
    print(f"loss {optimizer.progress.loss:.4f}, weights {andon.digest(model)}")
group.close()
