"""CUDA's path on a machine without CUDA: order among streams, waits of the host, bytes.

A few lines of C++ make a CPU-only torch believe in one CUDA device (:mod:`tests.pretended.device`).
Under ``FakeTensorMode`` the project's and torch's own Python then runs as on a GPU, autograd on the
forward's streams, FSDP2 on its five, the snapshot on its own, with tensors that have no memory;
:mod:`tests.pretended.trace` sees every operation. That shows order, waits and bytes. It shows no
values, no speed, no kernels, and nothing of NCCL.

The programs here run as processes of their own: the device must be there before torch is imported.
"""
