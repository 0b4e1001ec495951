"""Manifests for Kubernetes: a JobSet, or a TrainJob of Kubeflow Trainer v2 with its runtime.

Both make one Indexed Job with a pod a node, in a JobSet that starts all pods again together.
How a pod ended decides: settings, a halt and a missing checkpoint end the set; preemption and a
drained node start it again without counting; anything else counts against ``restarts``.

JobSet's in-place restart (alpha) would help only where the launcher dies: no container fails
because a rank does. It needs an agent in each pod, whose image is not published. Pods have no
deletion cost, since the loss of any one restarts the set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from runner.launch.torchrun import DEFAULT_PORT

_SPEC = Path(__file__).with_name("jobset.yaml")
_SHARED = "run"

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pods:
    """What to run where.

    Args:
        num_ranks: processes a pod, each with a GPU where ``gpus`` is set.
        claim: persistent volume claim for ``out``, shared by all pods; mounted at ``mount``.
        grace_seconds: from SIGTERM to SIGKILL, for the last checkpoint.
        restarts: restarts of the whole set after crashes.
    """

    name: str
    image: str
    nodes: int
    num_ranks: int
    namespace: str | None = None
    gpus: bool = False
    claim: str | None = None
    mount: str = "/runs"
    grace_seconds: int = 120
    restarts: int = 20
    resources: Mapping[str, str] = field(default_factory=dict)


def job_set(pods: Pods, overrides: Sequence[str]) -> Manifest:
    """A ``jobset.x-k8s.io/v1alpha2`` JobSet."""
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(pods),
        "spec": _set_spec(pods, overrides),
    }


def train_job(pods: Pods, overrides: Sequence[str]) -> list[Manifest]:
    """A TrainingRuntime and a TrainJob that uses it.

    The rules for exit codes can stand in a runtime only, so the job brings its own.
    """
    group = "trainer.kubeflow.org"
    version = f"{group}/v1alpha1"
    runtime = {
        "apiVersion": version,
        "kind": "TrainingRuntime",
        "metadata": _metadata(pods),
        "spec": {
            "mlPolicy": {"numNodes": pods.nodes, "torch": {}},
            "template": {"spec": _set_spec(pods, overrides)},
        },
    }
    job = {
        "apiVersion": version,
        "kind": "TrainJob",
        "metadata": _metadata(pods),
        "spec": {
            "runtimeRef": {"apiGroup": group, "kind": "TrainingRuntime", "name": pods.name},
            "trainer": {"numNodes": pods.nodes, "numProcPerNode": pods.num_ranks},
        },
    }
    return [runtime, job]


def _metadata(pods: Pods) -> Manifest:
    return {"name": pods.name, **({"namespace": pods.namespace} if pods.namespace else {})}


def _set_spec(pods: Pods, overrides: Sequence[str]) -> Manifest:
    spec: Manifest = yaml.safe_load(_SPEC.read_text())
    spec["failurePolicy"]["maxRestarts"] = pods.restarts
    spec["network"]["subdomain"] = pods.name
    job = spec["replicatedJobs"][0]["template"]["spec"]
    job["completions"] = job["parallelism"] = pods.nodes
    pod = job["template"]["spec"]
    pod["terminationGracePeriodSeconds"] = pods.grace_seconds
    (container,) = pod["containers"]
    container |= {"image": pods.image, "command": _command(pods, overrides)}
    if pods.claim:
        claim = {"claimName": pods.claim}
        pod["volumes"].append({"name": _SHARED, "persistentVolumeClaim": claim})
        container["volumeMounts"].append({"name": _SHARED, "mountPath": pods.mount})
    limits = dict(pods.resources)
    if pods.gpus:
        limits["nvidia.com/gpu"] = str(pods.num_ranks)
    if limits:
        container["resources"] = {"limits": limits}
    return spec


def _command(pods: Pods, overrides: Sequence[str]) -> list[str]:
    """Starts one launcher a pod; it ends with the runner's own exit code.

    It starts ranks again itself: a new pod would lose the snapshots in ``/dev/shm``.
    """
    command = ["python", "-m", "runner", "launch"]
    command += ["--nproc", str(pods.num_ranks)]
    if pods.nodes > 1:
        # The first pod's name, which a JobSet keeps from one start to the next.
        head = f"{pods.name}-node-0-0.{pods.name}:{DEFAULT_PORT}"
        command += ["--nodes", str(pods.nodes), "--head", head, "--name", pods.name]
    return [*command, *overrides]
