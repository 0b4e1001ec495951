"""Around a run: starts it, watches it from outside, starts it again; on one node or many.

Owns the processes of torchrun, Slurm and Kubernetes. Must not know the
loop or the ring; only ``agent``, which is torchrun itself, imports torch.
"""
