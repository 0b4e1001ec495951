"""A loop of your own with the guard in it: it survives bad batches, and a kill at any moment.

    python examples/own_loop.py runs/loop

Kill it and start it again: it goes on where the newest checkpoint is, and ends with the same bits.
"""

import sys

import torch

from runner import Guard

out = sys.argv[1]
torch.manual_seed(0)
truth = torch.randn(16, 1)
inputs = torch.randn(300, 32, 16)
batches = [(x, x @ truth) for x in inputs]
batches[100] = (inputs[100] * float("nan"), batches[100][1])

model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
guard = Guard(out, model=model, optimizer=optimizer, scheduler=scheduler, every=20, clip=1.0)
for x, y in guard.over(batches):
    loss = (model(x) - y).square().mean()
    loss.backward()
    if guard.ok(loss):  # False: the batch was bad, or the guard went back
        optimizer.step()
        scheduler.step()
    optimizer.zero_grad()
print(f"skipped batches {guard.skipped}, {guard.updates} updates, loss {loss.item():.4f}")
guard.close()
