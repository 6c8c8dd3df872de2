"""Engine ``k8s``: a ``TrainJob`` of Kubeflow Trainer v2 or a ``JobSet``, by the official ``kubernetes`` client.

A ``TrainJob`` has a fixed number of nodes: the cluster's torch runtime sets torchrun's ``PET_*`` variables in its pods.
A ``JobSet`` serves elastic numbers, and clusters without Kubeflow Trainer: its pods meet at the first of them. Both run
torchrun with ``--resume``, so that a pod that was evicted or restarted resumes from the latest valid checkpoint.
"""

from __future__ import annotations

import codecs
import contextlib
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import UsageError
from lockstep.launch.engines.spec import EngineOption, EngineSpec, Job, JobHandle, JobStatus

#: Variable of the pods: the id of their job.
_JOB = "LOCKSTEP_K8S_JOB"
#: Group, version and plural of each kind, as the API server names them.
_KINDS = {
    "TrainJob": ("trainer.kubeflow.org", "v1alpha1", "trainjobs"),
    "JobSet": ("jobset.x-k8s.io", "v1alpha2", "jobsets"),
}
#: How long torchrun's agents in a ``JobSet`` wait: images are pulled at different times.
_RDZV_CONF = "join_timeout=600,last_call_timeout=10,keep_alive_interval=2,keep_alive_max_attempt=5"
#: Kubernetes kills a pod this many seconds after torchrun may have killed its ranks.
_EXTRA_GRACE_S = 15
#: Seconds to connect to the API server, and to wait for an answer.
_TIMEOUT_S = (10, 30)
_PODS_INTERVAL_S = 2.0
#: Label of a pod: its number in the job.
_INDEX = "batch.kubernetes.io/job-completion-index"
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?")
_SIZE = re.compile(r"[0-9]+(\.[0-9]+)?([kMGT]i?)?")


class Kubernetes:
    """Custom objects in the cluster that the kubeconfig names."""

    def manifest(self, job: Job) -> str:
        """Return the document as YAML."""
        import yaml

        text: str = yaml.safe_dump(document(job), sort_keys=False, width=120)
        return text

    def check(self, job: Job) -> None:
        """Refuse wrong values, and a cluster that does not answer."""
        document(job)
        with _requests("the API server does not answer") as client:
            client.VersionApi().get_code(_request_timeout=_TIMEOUT_S)

    def submit(self, job: Job) -> JobHandle:
        """Create the object."""
        body = document(job)
        handle = JobHandle(engine=SPEC.name, id=_id_of(body), run_folder=job.run_folder)
        *collection, _name = _path_of(handle)
        with _requests(f"the cluster refuses {handle.id}") as client:
            api = client.CustomObjectsApi()
            api.create_namespaced_custom_object(*collection, body, _request_timeout=_TIMEOUT_S)
        return handle

    def status(self, handle: JobHandle) -> JobStatus:
        """Return the newest condition of the object; a deleted one is over."""
        with _requests(f"the state of {handle.id} is unknown") as client:
            api = client.CustomObjectsApi()
            try:
                content = api.get_namespaced_custom_object(*_path_of(handle), _request_timeout=_TIMEOUT_S)
            except client.ApiException as error:
                if error.status != 404:
                    raise
                return JobStatus(text="deleted", is_over=True, exit_code=143)
        conditions = content.get("status", {}).get("conditions", ())
        types = [condition["type"] for condition in conditions if condition["status"] == "True"]
        for name, code in (("Failed", 1), ("Complete", 0), ("Completed", 0)):
            if name in types:
                return JobStatus(text=name, is_over=True, exit_code=code)
        return JobStatus(text=types[-1] if types else "Running", is_waiting="Suspended" in types)

    def stop(self, handle: JobHandle) -> None:
        """Delete the object: its pods get SIGTERM, and the time for a checkpoint."""
        with _requests(f"{handle.id} cannot be deleted") as client:
            client.CustomObjectsApi().delete_namespaced_custom_object(
                *_path_of(handle), propagation_policy="Foreground", _request_timeout=_TIMEOUT_S
            )

    def logs(self, handle: JobHandle) -> Iterator[str]:
        """Yield the output of the first pod, and of each that replaces it, and why pods are not placed.

        Waits for output while the first pod runs. A request that fails is reported once and made again.
        """
        *_, namespace, _plural, name = _path_of(handle)
        selector = f"jobset.sigs.k8s.io/jobset-name={name}"
        printed: set[str] = set()
        shown = _Shown()
        while True:
            try:
                with _requests(f"the pods of {handle.id} are unknown") as client:
                    core = client.CoreV1Api()
                    pods = core.list_namespaced_pod(namespace, label_selector=selector, _request_timeout=_TIMEOUT_S)
                    for pod in pods.items:
                        for message in _unschedulable(pod):
                            if message not in printed:
                                printed.add(message)
                                yield f"{pod.metadata.name} waits for a node: {message}\n"
                        is_first = (pod.metadata.labels or {}).get(_INDEX) == "0"
                        if is_first and pod.status.phase != "Pending":
                            yield from shown.new_output(core, pod)
            except UsageError as error:
                if error.why not in printed:
                    printed.add(error.why)
                    yield f"{error.what}: {error.why}\n"
            yield ""
            time.sleep(_PODS_INTERVAL_S)


class _Shown:
    """How much of each container's output has been shown: a connection may break, and a container is restarted."""

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()
        self._complete: set[str] = set()

    def new_output(self, core: Any, pod: Any) -> Iterator[str]:
        """Yield the new output of a pod's container, as long as it runs."""
        containers = [status.container_id for status in pod.status.container_statuses or ()]
        container = f"{pod.metadata.uid} {containers}"
        if container in self._complete:
            return
        log = core.read_namespaced_pod_log(
            pod.metadata.name, pod.metadata.namespace, follow=True, _preload_content=False
        )
        decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a chunk may end within a character
        position = 0
        for chunk in log.stream():
            new = chunk[max(0, self._bytes[container] - position) :]
            position += len(chunk)
            self._bytes[container] += len(new)
            yield decoder.decode(new)
        if pod.status.phase != "Running":
            self._complete.add(container)


def _unschedulable(pod: Any) -> Iterator[str]:
    """Yield the scheduler's messages on resources that no node has free for ``pod``."""
    for condition in pod.status.conditions or () if pod.status.phase == "Pending" else ():
        if condition.reason == "Unschedulable":
            yield condition.message or "no node has its resources free"


def document(job: Job) -> dict[str, Any]:
    """Make the custom object of ``job``. Raises :class:`UsageError`: a value is missing, or would be refused."""
    kind = _kind(job)
    name = _object_name(job.run_folder.name.lower().replace("_", "-"), "the name of the run folder")
    namespace = _object_name(job.options.get("k8s_namespace") or "default", "--k8s-namespace")
    group, version, _ = _KINDS[kind]
    body = {"apiVersion": f"{group}/{version}", "kind": kind, "metadata": {"name": name, "namespace": namespace}}
    make_spec = _train_job if kind == "TrainJob" else _job_set
    return {**body, "spec": make_spec(job, body)}


def _train_job(job: Job, body: dict[str, Any]) -> dict[str, Any]:
    """Return the ``spec`` of a ``TrainJob``: the runtime's template, with a trainer and a patch of its pods."""
    group, _, _ = _KINDS["TrainJob"]
    resources = _resources(job)
    trainer = {
        **_launcher(job, body),
        "numNodes": job.nodes.maximum,
        "numProcPerNode": job.ranks_per_node,
        **({"resourcesPerNode": resources} if resources else {}),
    }
    patch = {"name": "node", "template": {"spec": {"template": {"spec": _pod(job, _container(job))}}}}
    return {
        "runtimeRef": {
            "name": job.options.get("k8s_runtime") or "torch-distributed",
            "kind": "ClusterTrainingRuntime",
            "apiGroup": group,
        },
        "trainer": trainer,
        "runtimePatches": [
            {
                "manager": "lockstep.dev/train",
                "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [patch]}}},
            }
        ],
    }


def _job_set(job: Job, body: dict[str, Any]) -> dict[str, Any]:
    """Return the ``spec`` of a ``JobSet``: one job with a pod for each node."""
    resources = _resources(job)
    container = {
        **_container(job),
        **_launcher(job, body, meeting=_meeting(job, body["metadata"]["name"])),
        **({"resources": resources} if resources else {}),
    }
    pods = {
        "completionMode": "Indexed",
        "completions": job.nodes.maximum,
        "parallelism": job.nodes.maximum,
        "template": {"spec": _pod(job, container, restartPolicy="OnFailure")},
    }
    return {
        "failurePolicy": {"maxRestarts": job.max_restarts},
        "network": {"enableDNSHostnames": True},
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": pods}}],
    }


def _launcher(job: Job, body: dict[str, Any], meeting: Sequence[str] = ()) -> dict[str, Any]:
    """Return image, command and environment of a node's launcher, which is torchrun."""
    image = job.options.get("k8s_image")
    if not image:
        raise UsageError("--on k8s needs an image", fix="add --k8s-image with an image that has Lockstep and the task")
    runs_path, _ = _runs_volume(job)
    is_below = job.run_folder.is_relative_to(runs_path)
    torchrun = ["python", "-m", "torch.distributed.run", *meeting, f"--max-restarts={job.max_restarts}"]
    variables = {
        **job.environment,
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(round(job.grace_s)),  # from SIGTERM until torchrun kills the ranks
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        _JOB: _id_of(body),
    }
    return {
        "image": image,
        "command": [*torchrun, *job.arguments(job.run_folder if is_below else runs_path / job.run_folder.name)],
        "env": [{"name": name, "value": value} for name, value in variables.items()],
    }


def _resources(job: Job) -> dict[str, Any]:
    """Return the resources of a node; empty without GPUs."""
    number = (job.gpus_per_node or "").rpartition(":")[2]
    return {"limits": {"nvidia.com/gpu": number}} if number else {}


def _container(job: Job) -> dict[str, Any]:
    """Return the container of a node with its mounts; the launcher is added to it."""
    runs_path, _ = _runs_volume(job)
    mounts = [{"name": "runs", "mountPath": str(runs_path)}, {"name": "shm", "mountPath": "/dev/shm"}]
    return {"name": "node", "volumeMounts": mounts}


def _pod(job: Job, container: dict[str, Any], **more: str) -> dict[str, Any]:
    """Return the ``spec`` of a node's pod."""
    shared_memory = job.options.get("k8s_shm") or "8Gi"
    if not _SIZE.fullmatch(shared_memory):
        raise UsageError(f"--k8s-shm {shared_memory!r} is not a size", fix="write 8Gi, for example")
    _, runs_volume = _runs_volume(job)
    # Loader workers share batches in /dev/shm, which has 64 MB otherwise.
    shm_volume = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": shared_memory}}
    return {
        "terminationGracePeriodSeconds": round(job.grace_s) + _EXTRA_GRACE_S,
        "volumes": [runs_volume, shm_volume],
        **more,
        "containers": [container],
    }


def _kind(job: Job) -> str:
    default = "JobSet" if job.nodes.is_elastic else "TrainJob"
    text = job.options.get("k8s_kind") or default
    kind = next((kind for kind in _KINDS if kind.lower() == text.lower()), None)
    if kind is None:
        raise UsageError(f"--k8s-kind {text!r} is unknown", fix=f"write {' or '.join(_KINDS).lower()}")
    if kind == "TrainJob" and job.nodes.is_elastic:
        raise UsageError(
            f"a TrainJob cannot have {job.nodes} nodes",
            why="Kubeflow Trainer has no elastic policy",
            fix="write one number of nodes, or --k8s-kind jobset",
        )
    return kind


def _object_name(name: str, origin: str) -> str:
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{origin} is {name[:80]!r}, which names no object of Kubernetes",
            why="a name has at most 52 characters of a-z, 0-9 and -, and begins with a letter",
            fix="choose another one with --save-dir or --k8s-namespace",
        )
    return name


def _runs_volume(job: Job) -> tuple[Path, dict[str, Any]]:
    """Return the path of the run folders in the pods, and the volume there."""
    claim, _, path = (job.options.get("k8s_volume") or "").partition(":")
    if not claim and job.mirror is None:
        raise UsageError(
            "the run would be lost with its pods",
            why="neither a volume nor a mirror keeps its folder",
            fix="add --k8s-volume CLAIM:/runs with a PersistentVolumeClaim, or --mirror URL",
        )
    if not claim and job.nodes.maximum > 1:
        raise UsageError(
            f"{job.nodes} nodes need a volume",
            why="all ranks use one run folder; each pod would have a different one, also with a mirror",
            fix="add --k8s-volume CLAIM:/runs with a PersistentVolumeClaim of access mode ReadWriteMany",
        )
    volume = {"persistentVolumeClaim": {"claimName": claim}} if claim else {"emptyDir": {}}
    return Path(path or "/runs"), {"name": "runs", **volume}


def _meeting(job: Job, name: str) -> tuple[str, ...]:
    """Return flags of torchrun with which the pods of a ``JobSet`` meet at the first one."""
    return (
        f"--nnodes={job.nodes}",
        f"--nproc-per-node={job.ranks_per_node}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={name}-node-0-0.{name}:29400",
        f"--rdzv-id={name}",
        f"--rdzv-conf={_RDZV_CONF}",
    )


def _id_of(body: dict[str, Any]) -> str:
    return f"{body['kind']}/{body['metadata']['namespace']}/{body['metadata']['name']}"


def _path_of(handle: JobHandle) -> tuple[str, str, str, str, str]:
    """Return group, version, namespace, plural and name of the object, in the order of the client's arguments."""
    kind, namespace, name = [*handle.id.split("/"), "", ""][:3]
    if kind not in _KINDS or not _NAME.fullmatch(namespace) or not _NAME.fullmatch(name):
        raise UsageError(f"{handle.id[:80]!r} names no job of Kubernetes", fix=f"see job.json in {handle.run_folder}")
    group, version, plural = _KINDS[kind]
    return group, version, namespace, plural, name


@contextlib.contextmanager
def _requests(failure: str) -> Iterator[Any]:
    """Read the kubeconfig and yield the client library; an error in the block becomes one :class:`UsageError`."""
    try:
        from kubernetes import client, config
        from urllib3.exceptions import HTTPError
    except ImportError:
        raise UsageError(
            "--on k8s needs the package kubernetes", fix="pip install 'lockstep-train[kubernetes]'"
        ) from None
    try:
        try:
            config.load_kube_config()  # type: ignore[no-untyped-call]
        except config.ConfigException:  # in a pod of the cluster
            config.load_incluster_config()  # type: ignore[no-untyped-call]
        yield client
    except config.ConfigException as error:
        raise UsageError(
            "no Kubernetes cluster is configured",
            why=str(error).splitlines()[0],
            fix="set KUBECONFIG, or write the manifest with --print and apply it with kubectl",
        ) from None
    except client.ApiException as error:
        raise UsageError(
            failure,
            why=f"{error.status} {error.reason}: {str(error.body)[:500]}",
            fix="check permissions with `kubectl auth can-i`, --k8s-namespace and --k8s-kind (404: not installed)",
        ) from None
    except (HTTPError, OSError) as error:
        raise UsageError(
            failure, why=f"{type(error).__name__}: {str(error)[:300]}", fix="`kubectl cluster-info` shows its address"
        ) from None


SPEC = EngineSpec(
    name="k8s",
    summary="create a Kubeflow TrainJob, or a JobSet, and follow its first pod",
    make=Kubernetes,
    options=(
        EngineOption(name="k8s_image", help="Container image with Lockstep and the task.", metavar="IMAGE"),
        EngineOption(name="k8s_namespace", help="Kubernetes namespace. Default: default.", metavar="NAME"),
        EngineOption(
            name="k8s_volume",
            help="PersistentVolumeClaim for run folders, and its path in the pods. Default: none; path: /runs.",
            metavar="CLAIM[:PATH]",
        ),
        EngineOption(name="k8s_shm", help="Shared memory of each pod. Default: 8Gi.", metavar="SIZE"),
        EngineOption(
            name="k8s_kind",
            help="trainjob (Kubeflow Trainer 2.2 or newer) or jobset. Default: trainjob; jobset for --nodes MIN:MAX.",
            metavar="KIND",
        ),
        EngineOption(name="k8s_runtime", help="Runtime of a TrainJob. Default: torch-distributed.", metavar="NAME"),
    ),
    current_job=lambda environ: environ.get(_JOB),
)
