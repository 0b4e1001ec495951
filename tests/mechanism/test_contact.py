# ruff: noqa: E501 (the texts stand as they were written)
"""Whose fault an exception is, by texts that torch, gloo and NCCL really wrote.

Each row says where its text is from: seen here with torch 2.13, or a project's issue thread.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import signal
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist

from runner.health.lost_peer import LOST_CONTACT, OWN, UNCLEAR, message_of, whose_fault
from runner.health.rank_report import Report
from runner.health.root_cause import find_root_cause

HERE = "torch 2.13, here"
PAIR = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] "
NCCL = "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:317, "
SYSTEM = (
    "unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5\n"
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device "
    "error. \nLast error:\n"
)
INTERNAL = (
    "internal error - please report this issue to the NCCL developers, NCCL version 2.21.5\n"
    "ncclInternalError: Internal check failed.\nLast error:\n"
)
REMOTE = (
    "remote process exited or there was a network error, NCCL version 2.21.5\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting "
    "prematurely.\nLast error:\n"
)
CUDA = (
    "unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
)
USAGE = (
    "invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.21.5\n"
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
)
WATCHDOG = "[PG ID 0 PG GUID 0(default_pg) Rank 2] Process group watchdog thread terminated with "
WORK = "WorkNCCL(SeqNum=1, OpType=BROADCAST, NumelIn=131072000, Timeout(ms)=600000)"
KERNEL = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the "
    "stacktrace below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
)
FRAMES = (
    "\nException raised from c10_cuda_check_implementation at ../c10/cuda/CUDAException.cpp:43 "
    "(most recent call first):\nframe #3: c10d::ProcessGroupNCCL::WorkNCCL::isCompleted() + 0xa0\n"
)
UNIQUE_ID = (
    "[1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value "
    "store by key '0', but store->get('0') got error: "
)

# (the exception's class, its text, where the text is from)
LOST = [
    # gloo
    (RuntimeError, PAIR + "Connection closed by peer [127.0.0.1]:13698. This is typically caused by a remote worker crashing. Check the logs of the remote worker before reporting an error. GLHF! 🏖️", HERE),
    (RuntimeError, PAIR + "Read error [127.0.0.1]:37800: Connection reset by peer. This is typically caused by a remote worker hanging or bugs in the application. Check the logs of the remote worker before reporting an error. GLHF! 🏖️", HERE),
    (RuntimeError, "[../third_party/gloo/gloo/transport/tcp/pair.cc:598] Connection closed by peer [18.25.6.30]:28048", "PyTorch issue 75512"),
    (RuntimeError, "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:535] Read error [10.1.3.122]:42916: Connection reset by peer\n", "Mooncake issue 842"),
    (RuntimeError, "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation to complete", HERE),
    (RuntimeError, "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:129] Timed out waiting 2000ms for send operation to complete", HERE),
    (RuntimeError, "Application timeout caused pair closure", HERE),
    (RuntimeError, "Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error", "SGLang issue 3226"),
    (RuntimeError, "Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.h:301] Connect timeout [none]", "dmlcloud issue 47"),
    (RuntimeError, "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 1000 ms\n Original exception: \n[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 999ms for recv operation to complete", HERE),
    (RuntimeError, "Rank 2 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0. Please check rank 0 logs for faulty rank.\n Original exception: \n" + PAIR + "Connection closed by peer [127.0.0.1]:16613.", HERE),
    # torch's key-value store
    (dist.DistNetworkError, "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?", HERE),
    (dist.DistNetworkError, "Broken pipe", HERE),
    (dist.DistNetworkError, "The client socket has timed out after 2000ms while trying to connect to (127.0.0.1, 57665).", HERE),
    (dist.DistStoreError, "wait timeout after 1000ms, keys: /nokey", HERE),
    (dist.DistStoreError, "Timed out after 3 seconds waiting for clients. 1/3 clients joined.", HERE),
    (dist.DistStoreError, "Socket Timeout", "Pai-Megatron-Patch issue 468"),
    # NCCL
    (dist.DistBackendError, NCCL + REMOTE + "socketProgressOpt: Call to recv from 172.16.1.9<33759> failed : Connection reset by peer", "NCCL issue 2076"),
    (dist.DistBackendError, NCCL + REMOTE + "NET/OFI Request 0x7f14cc5b60c0 completed with error. RC: 113. Error: 2 (UNDELIVERABLE). Completed length: 0", "NCCL issue 1928"),
    (dist.DistBackendError, NCCL + REMOTE + "NET/IB : Got completion from peer 11.214.147.122<39138> with error 12, opcode 0, len 0, vendor err 129", "stanford_alpaca issue 207"),
    (dist.DistBackendError, NCCL + INTERNAL + "Net : Connection closed by remote peer user<50260>", "NCCL issue 1514: ncclRemoteError may surface as ncclInternalError, NCCL issue 795"),
    (dist.DistBackendError, NCCL + INTERNAL + "Socket recv failed while polling for opId=0x7faab2221da0", "NCCL issues 1029 and 1235: the proxy of another rank had gone, out of memory"),
    (dist.DistBackendError, NCCL + INTERNAL + "Net : Call to recv from 10.58.226.18<38309> failed : Connection refused", "vLLM issue 798"),
    (dist.DistBackendError, NCCL + SYSTEM + "socketStartConnect: Connect to 192.168.19.14<52822> failed : No route to host", "pytorch-transformer-distributed issue 1"),
    (dist.DistBackendError, NCCL + SYSTEM + "socketStartConnect: Connect to 127.0.0.1<45069> failed : Software caused connection abort", "awsome-distributed-ai issue 192"),
    (dist.DistBackendError, NCCL + SYSTEM + "Call to ibv_modify_qp failed with 110 Connection timed out, on dev mlx_x:1, curr state INIT, next state RTR", "NCCL issue 2013"),
    (dist.DistBackendError, NCCL + SYSTEM + "Call to ibv_modify_qp failed with error Network is unreachable", "nccl-tests issue 185"),
    (dist.DistBackendError, f"[Rank 0] Watchdog caught collective operation timeout: {WORK} ran for 600081 milliseconds before timing out.", "torch's ProcessGroupNCCL.cpp"),
    (RuntimeError, "NCCL communicator was aborted on rank 1. Original reason for failure was: Work: WorkNCCL(OpType=ALLREDUCE, TensorShape=[1], Timeout(ms)=2000) timed out in call to wait().", "PyTorch pull request 64241"),
    (dist.DistBackendError, WATCHDOG + f"exception: {NCCL}{REMOTE}NET/IB : Got completion from peer 10.42.0.2<47534> with error 5, opcode 48, len 32764, vendor err 244", "a training log, in slides"),
    (dist.DistBackendError, UNIQUE_ID + "Socket Timeout\nException raised from recvBytes at ../torch/csrc/distributed/c10d/Utils.hpp:580 (most recent call first):", "PyTorch issue 82091"),
    (dist.DistBackendError, UNIQUE_ID + "wait timeout after 600000ms, keys: /default_pg/0//cuda//0\nException raised from doWait at TCPStore.cpp:578 (most recent call first):", "NeMo Speech issue 14399"),
]  # fmt: skip
OWN_FAULTS = [
    # the device
    (dist.DistBackendError, NCCL + CUDA + "Cuda failure 999 'unknown error'", "PyTorch issue 170045"),
    (dist.DistBackendError, NCCL + CUDA + "Cuda failure 'invalid argument'", "PyTorch issue 111187"),
    (dist.DistBackendError, NCCL + CUDA + "Cuda failure 'out of memory'", "Open-Sora-Plan issue 386"),
    (dist.DistBackendError, NCCL + CUDA + "Failed to CUDA calloc 6291456 bytes", "NCCL issue 1235: the rank that had no memory left"),
    (RuntimeError, "NCCL Error 1: unhandled cuda error (run with NCCL_DEBUG=INFO for details)", "NCCL issue 1283"),
    (RuntimeError, "NCCL error in: /pytorch/torch/lib/c10d/ProcessGroupNCCL.cpp:784, unhandled cuda error, NCCL version 2.7.8", "PyTorch issue 62316"),
    (dist.DistBackendError, WATCHDOG + "exception: CUDA error: an illegal memory access was encountered" + KERNEL + FRAMES, "LMDeploy issue 3258"),
    (dist.DistBackendError, f"[Rank 0] Collective {WORK} raised the following async exception: {NCCL}{CUDA}Cuda failure 'uncorrectable NVLink error detected during the execution'", "PyTorch issue 58155, in torch's words"),
    (torch.AcceleratorError, "CUDA error: device-side assert triggered\nSearch for `cudaErrorAssert' in CUDA's documentation for more information." + KERNEL, "pytorch-deep-learning issue 1290"),
    (RuntimeError, "CUDA error: device-side assert triggered" + KERNEL, "nanoGPT issue 470"),
    (torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 2.00 GiB", "torch's CUDACachingAllocator.cpp"),
    # the settings
    (dist.DistBackendError, NCCL + USAGE + "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 10", "verl issue 161"),
    (RuntimeError, "[enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/device.cc:83] ifa != nullptr. Unable to find address for: ib0", "YOLOX issue 139"),
    (RuntimeError, "[enforce fail at ../third_party/gloo/gloo/transport/tcp/device.cc:127] rp != nullptr. Unable to find address for: dgx-1.ai", "pipedream issue 32"),
    (RuntimeError, "[enforce fail at ../third_party/gloo/gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 1046204 vs 1040256", "prime-diloco issue 68"),
    (RuntimeError, "makeDeviceForHostname(): unsupported gloo device", "torch's GlooDeviceFactory.cpp"),
    # this host
    (dist.DistBackendError, NCCL + SYSTEM + "Error while creating shared memory segment /dev/shm/nccl-EoOvZr (size 7340384)", "vLLM issue 14537"),
    (dist.DistBackendError, NCCL + SYSTEM + "Call to ibv_create_cq failed with error Cannot allocate memory", "DeepEP issue 143"),
    (dist.DistBackendError, NCCL + SYSTEM + "Call to socket failed : Too many open files", "NCCL issue 550"),
    (dist.DistNetworkError, "The server socket has failed to listen on any local network address. port: 38275, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use", HERE),
    # wrong arguments, and errors that have nothing to do with collectives but share their words
    (RuntimeError, "ProcessGroupGloo::allgather: invalid tensor size at index 1 (expected (3), got (2))", HERE),
    (RuntimeError, "[rank0]:[F1122 02:17:08.350121719 ProcessGroupGloo.cpp:1537] Check failed: outputShape[0] * worldSize == inputShape[0] (6 vs. 5). \n", HERE),
    (RuntimeError, "Cannot use ReduceOp.BAND with non-integral dtype", HERE),
    (dist.QueueEmptyError, "queue is empty", HERE),
    (RuntimeError, "Detected mismatch between collectives on ranks. Rank 1 is running collective: CollectiveFingerPrint(SequenceNumber=485, OpType=ALLREDUCE, TensorShape=[25]), but Rank 0 is running collective: CollectiveFingerPrint(SequenceNumber=485, OpType=BROADCAST, TensorShape=[1]).Collectives differ in the following aspects:   Op type: ALLREDUCEvs BROADCAST", "SpeechBrain issue 2401: every rank gets it, and all are named"),
    (RuntimeError, "DataLoader timed out after 5 seconds", "torch's dataloader.py"),
    (RuntimeError, "shard 00017.tar: Connection reset by peer", "a data set behind a network, made up"),
    (ConnectionResetError, "[Errno 104] Connection reset by peer", "Python: no collective raises it"),
    (OSError, "[Errno 28] No space left on device", "Python"),
    (ValueError, "gloo, NCCL and Socket are words that anybody may use", "made up"),
]  # fmt: skip
NOT_TOLD = [
    (dist.DistBackendError, NCCL + INTERNAL + "NET/OFI Received an invalid tag 0 for device 0", "aws-ofi-nccl issue 715"),
    (dist.DistBackendError, NCCL + INTERNAL.removesuffix("Last error:\n"), "NCCL issue 1029"),
    (RuntimeError, "NCCL error in: ProcessGroupNCCL.cpp:1191, unhandled system error, NCCL version 2.10.3\nncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. It can be also caused by unexpected exit of a remote peer.", "NCCL issue 875: NCCL before it had ncclRemoteError"),
    (dist.DistBackendError, "NCCL communicator was aborted on rank 0. ", "Search-R1 issue 170"),
    (dist.DistNetworkError, "The IPv4 network addresses of (head, 29500) cannot be retrieved (gai error: -3 - Temporary failure in name resolution).", "torch's socket.cpp"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "expected", "text"),
    [
        pytest.param(kind, expected, text, id=f"{expected}-{number}")
        for expected, rows in ((LOST_CONTACT, LOST), (OWN, OWN_FAULTS), (UNCLEAR, NOT_TOLD))
        for number, (kind, text, _) in enumerate(rows)
    ],
)
def test_whose_fault_it_is(kind: type[Exception], expected: str, text: str) -> None:
    assert whose_fault(kind(text)) == expected


def test_nccls_last_error_is_told() -> None:
    error = dist.DistBackendError(NCCL + CUDA + "Cuda failure 999 'unknown error'" + FRAMES)
    words = message_of(error)
    assert words.startswith("NCCL error in: ") and words.endswith(
        "Cuda failure 999 'unknown error'"
    )
    assert "\n" not in words and "frame" not in words
    assert message_of(ValueError("one\ntwo")) == "one" and message_of(KeyError()) == "KeyError"


def report(rank: int, kind: str, message: str = "", time: float = 0.0) -> Report:
    return Report(
        rank=rank, world_size=3, kind=kind, step=7, phase="agree", message=message, time=time
    )


def test_an_error_that_does_not_tell_is_the_cause_only_where_nothing_is_surer() -> None:
    lost, unclear = report(0, LOST_CONTACT), report(1, UNCLEAR, "NCCL error: internal error")
    alone = find_root_cause([lost, unclear, report(2, "called")], 3)
    assert (alone.kind, alone.ranks) == (UNCLEAR, (1,)) and "internal error" in alone.reason
    gone = find_root_cause([lost, unclear], 3)
    assert (gone.kind, gone.ranks) == ("silence", (2,)), "a rank that is gone is surer"
    killed = find_root_cause([lost, unclear, report(2, "signal", "killed by SIGKILL", time=9.0)], 3)
    assert killed.ranks == (2,), "and so is one that was killed"


def _rank(rank: int, port: int, how: str, told: Any) -> None:
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
    limit = datetime.timedelta(seconds=2 if how == "hangs" else 60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL if how == "dies" else signal.SIGSTOP)
    try:
        dist.all_reduce(torch.ones(1000))
    except Exception as error:
        told.put((whose_fault(error), str(error)))
        return
    told.put(("went through", ""))


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_what_gloo_says_when_a_peer(how: str) -> None:
    """The texts above change with torch: this one is asked of the torch that is installed."""
    context = multiprocessing.get_context("fork")
    told = context.Queue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [context.Process(target=_rank, args=(rank, port, how, told)) for rank in range(2)]
    try:
        for rank in ranks:
            rank.start()
        assert told.get(timeout=60)[0] == LOST_CONTACT
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
