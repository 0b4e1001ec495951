"""Manifests for Kubernetes: a JobSet, or a TrainJob of Kubeflow Trainer v2 with its runtime.

Both make one Indexed Job with a pod a node, in a JobSet that starts all pods again together.
How a pod ended decides: settings, a halt and a missing checkpoint end the set; preemption and a
drained node start it again without counting; anything else counts against ``restarts``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runner.launch.torchrun import DEFAULT_PORT
from runner.system.exit_codes import EXIT_CONFIG, EXIT_HALTED, EXIT_NO_CHECKPOINT, EXIT_PREEMPTED

# Kubeflow asks for this name of the replicated job and of its container.
_NODE = "node"
_CONTAINER = "node"
_TRAINER_STEP = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
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
    version = "trainer.kubeflow.org/v1alpha1"
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
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "TrainingRuntime",
                "name": pods.name,
            },
            "trainer": {"numNodes": pods.nodes, "numProcPerNode": pods.num_ranks},
        },
    }
    return [runtime, job]


def _metadata(pods: Pods) -> Manifest:
    return {"name": pods.name, **({"namespace": pods.namespace} if pods.namespace else {})}


def _set_spec(pods: Pods, overrides: Sequence[str]) -> Manifest:
    return {
        "failurePolicy": {
            "maxRestarts": pods.restarts,
            # The message of a failed Job names the rule that matched the pod.
            "rules": [
                {
                    "name": "preempted",
                    "action": "RestartJobSetAndIgnoreMaxRestarts",
                    "onJobFailureReasons": ["PodFailurePolicy"],
                    "onJobFailureMessagePatterns": [
                        f"exit code {EXIT_PREEMPTED} ",
                        "condition DisruptionTarget ",
                    ],
                },
                {
                    "name": "a_restart_would_not_help",
                    "action": "FailJobSet",
                    "onJobFailureReasons": ["PodFailurePolicy"],
                },
            ],
        },
        "network": {"enableDNSHostnames": True, "subdomain": pods.name},
        "replicatedJobs": [
            {"name": _NODE, "replicas": 1, "template": _job_template(pods, overrides)}
        ],
    }


def _job_template(pods: Pods, overrides: Sequence[str]) -> Manifest:
    return {
        "metadata": {"labels": dict(_TRAINER_STEP)},
        "spec": {
            "completionMode": "Indexed",
            "completions": pods.nodes,
            "parallelism": pods.nodes,
            # One pod alone cannot be replaced: the set starts all again.
            "backoffLimit": 0,
            "podFailurePolicy": {
                "rules": [
                    _on_exit(EXIT_CONFIG, EXIT_HALTED, EXIT_NO_CHECKPOINT),
                    _on_exit(EXIT_PREEMPTED),
                    {
                        "action": "FailJob",
                        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                    },
                ]
            },
            "template": {"spec": _pod(pods, overrides)},
        },
    }


def _on_exit(*codes: int) -> Manifest:
    matched = {"containerName": _CONTAINER, "operator": "In", "values": sorted(codes)}
    return {"action": "FailJob", "onExitCodes": matched}


def _pod(pods: Pods, overrides: Sequence[str]) -> Manifest:
    memory = {"name": "shm", "emptyDir": {"medium": "Memory"}}
    volumes: list[Manifest] = [memory]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    if pods.claim:
        volumes.append({"name": _SHARED, "persistentVolumeClaim": {"claimName": pods.claim}})
        mounts.append({"name": _SHARED, "mountPath": pods.mount})
    container = {
        "name": _CONTAINER,
        "image": pods.image,
        "command": _command(pods, overrides),
        "volumeMounts": mounts,
        **({"resources": _resources(pods)} if _resources(pods) else {}),
    }
    return {
        # A container that the kubelet starts again hides how it ended.
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": pods.grace_seconds,
        "containers": [container],
        "volumes": volumes,
    }


def _resources(pods: Pods) -> Manifest:
    resources = dict(pods.resources) | (
        {"nvidia.com/gpu": str(pods.num_ranks)} if pods.gpus else {}
    )
    return {"limits": resources} if resources else {}


def _command(pods: Pods, overrides: Sequence[str]) -> list[str]:
    """Starts one agent a pod; it ends with the runner's own exit code."""
    command = [
        "python",
        "-m",
        "runner",
        "launch",
        "--restarts",
        "0",
        "--nproc",
        str(pods.num_ranks),
    ]
    if pods.nodes > 1:
        # The first pod's name, which a JobSet keeps from one start to the next.
        head = f"{pods.name}-{_NODE}-0-0.{pods.name}:{DEFAULT_PORT}"
        command += ["--nodes", str(pods.nodes), "--head", head, "--name", pods.name]
    return [*command, *overrides]
