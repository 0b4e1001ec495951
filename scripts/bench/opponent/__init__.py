"""What the runner is held against: each file is one loop, as a competent person writes it.

Each has ``train(task, device, after_step)``: it trains until ``after_step(loss)`` is true. The
process group exists already. Only ``bare`` is also a program of its own.
"""
