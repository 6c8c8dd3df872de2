"""Kubernetes: documents against the models of Kubeflow and JobSet, and requests to an API server.

Their command is run in :mod:`tests.launch.engines.test_engines_agree`.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import kubernetes_validate
import pytest
import yaml

from lockstep.cli.main import main
from lockstep.errors import UsageError
from lockstep.launch.engines.jobs import job_of_settings
from lockstep.launch.engines.spec import Job, JobHandle, NodeRange, find_engine
from lockstep.rundir.folder import RunDir
from tests.e2e.test_train import TOY

K8S = ("--on", "k8s", "--k8s-image", "registry.example.com/lockstep:1")
PRINTED = pytest.CaptureFixture[str]


def printed(capsys: PRINTED, *arguments: str) -> dict[str, Any]:
    """The document that ``lockstep train TOY ARGUMENTS --print`` prints."""
    capsys.readouterr()
    assert main(["train", TOY, *arguments, "--print"]) == 0
    manifest: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
    return manifest


def document(job: Job) -> dict[str, Any]:
    manifest: dict[str, Any] = yaml.safe_load(find_engine("k8s").make().manifest(job))
    return manifest


# --- the document ----------------------------------------------------------------------------------


def refuse_unknown_keys(manifest: dict[str, Any]) -> None:
    """The models drop unknown keys: nothing may be missing."""
    from kubeflow_trainer_api import models

    kinds = {
        ("trainer.kubeflow.org/v1alpha1", "TrainJob"): models.TrainerV1alpha1TrainJob,
        ("jobset.x-k8s.io/v1alpha2", "JobSet"): models.JobsetV1alpha2JobSet,
    }
    assert kinds[manifest["apiVersion"], manifest["kind"]].from_dict(manifest).to_dict() == manifest


def pod_of(manifest: dict[str, Any]) -> dict[str, Any]:
    """The pod that the cluster makes: for a TrainJob, that of Kubeflow's runtime with the trainer and the patch."""
    spec = manifest["spec"]
    if manifest["kind"] == "JobSet":
        (job,) = spec["replicatedJobs"]
        return job["template"]["spec"]["template"]["spec"]
    (patch,) = spec["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    trainer = spec["trainer"]
    merged = {**container, **{key: trainer[key] for key in ("image", "command", "env")}}
    merged["resources"] = trainer.get("resourcesPerNode", {})
    return {**pod, "restartPolicy": "OnFailure", "containers": [merged]}


def validate_pod(pod: dict[str, Any]) -> None:
    manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": pod}
    kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.slow
def test_documents_have_known_keys_only_and_hold_the_job(capsys: PRINTED, tmp_path: Path) -> None:
    more = ("--k8s-volume", "runs:/shared", "--gpus-per-node", "a100:4", "--save-dir", "/shared/my/run")
    train_job = printed(capsys, *K8S, *more, "--nodes", "2", "--k8s-namespace", "team", "--lr", "0.5")
    job_set = printed(capsys, *K8S, *more, "--nodes", "1:4", "--set", "launch.max_restarts=7", "--k8s-shm", "2Gi")
    for manifest in (train_job, job_set):
        refuse_unknown_keys(manifest)
        pod = pod_of(manifest)
        validate_pod(pod)
        (container,) = pod["containers"]
        assert container["image"] == K8S[-1]
        assert container["command"][:3] == ["python", "-m", "torch.distributed.run"]
        assert container["command"][-3:] == ["--save-dir", "/shared/my/run", "--resume"]
        assert container["resources"] == {"limits": {"nvidia.com/gpu": "4"}}
        assert [(mount["name"], mount["mountPath"]) for mount in container["volumeMounts"]] == [
            *(("runs", "/shared"), ("shm", "/dev/shm"))
        ]
        variables = {variable["name"]: variable["value"] for variable in container["env"]}
        # torchrun's own time for a stop ends before the pod's.
        assert 120 <= int(variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]
        assert not [name for name in variables if name.startswith("PET_")], "the runtime sets them"
    assert train_job["metadata"] == {"name": "run", "namespace": "team"}
    assert (train_job["spec"]["trainer"]["numNodes"], train_job["spec"]["trainer"]["numProcPerNode"]) == (2, 4)
    assert "optimizer.lr=0.5" in train_job["spec"]["trainer"]["command"]
    command = pod_of(job_set)["containers"][0]["command"]
    assert {"--nnodes=1:4", "--nproc-per-node=4", "--max-restarts=7"} <= set(command)
    assert "--rdzv-endpoint=run-node-0-0.run:29400" in command
    assert [volume.get("emptyDir") for volume in pod_of(job_set)["volumes"]][1]["sizeLimit"] == "2Gi"


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"k8s_image": None}, "--k8s-image"),
        ({"k8s_volume": None}, "--k8s-volume"),
        ({"k8s_shm": "much"}, "--k8s-shm"),
        ({"k8s_namespace": "../default"}, "--k8s-namespace"),
        ({"k8s_kind": "job"}, "--k8s-kind"),
        ({"k8s_kind": "trainjob"}, "--k8s-kind jobset"),
    ],
)
def test_values_that_no_cluster_takes_are_refused(change: dict[str, Any], flag: str) -> None:
    options = {"k8s_image": "image", "k8s_volume": "runs", **change}
    job = Job(command=("-m", "lockstep"), run_folder=Path("/tmp/run"), nodes=NodeRange(1, 2), options=options)
    with pytest.raises(UsageError) as caught:
        document(job)
    assert flag in caught.value.what + caught.value.fix


def test_a_resumed_job_gets_the_time_of_three_saves_to_stop(tmp_path: Path) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000010"
    checkpoint.mkdir(parents=True)
    for name, written_at in (("frozen.safetensors", 1), ("model.safetensors", 1000), ("manifest.json", 1100)):
        (checkpoint / name).touch()
        os.utime(checkpoint / name, (written_at, written_at))
    (checkpoint.parent / "last").symlink_to(checkpoint.name)
    for folder, grace_s in (("run", 300), ("new", 120)):
        settings = {"save_dir": str(tmp_path / folder)}
        options = {"k8s_image": "image", "k8s_volume": f"runs:{tmp_path}"}
        job, _ = job_of_settings("har", settings, gpus_per_node=None, options=options)
        pod = pod_of(document(job))
        variables = {variable["name"]: variable["value"] for variable in pod["containers"][0]["env"]}
        assert variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == str(grace_s)
        assert pod["terminationGracePeriodSeconds"] > grace_s


@pytest.mark.parametrize("nodes", [NodeRange(1, 1), NodeRange(2, 2), NodeRange(1, 2)])
def test_one_pod_with_a_mirror_needs_no_volume(nodes: NodeRange) -> None:
    """Several would have a run folder each, and refuse to train."""
    job = Job(command=(), run_folder=Path("/tmp/run"), nodes=nodes, mirror="s3://x", options={"k8s_image": "i"})
    if nodes.maximum == 1:
        assert pod_of(document(job))["volumes"][0] == {"name": "runs", "emptyDir": {}}
        return
    with pytest.raises(UsageError) as caught:
        document(job)
    assert "--k8s-volume" in caught.value.fix and "ReadWriteMany" in caught.value.fix


# --- requests --------------------------------------------------------------------------------------


TOO_FEW = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."


class ApiServer(BaseHTTPRequestHandler):
    """The paths of an API server that the engine asks for, with one object and its pod."""

    objects: ClassVar[dict[str, Any]] = {}
    requests: ClassVar[list[str]] = []
    refuses = False
    #: Answers to requests for the log, the last one for ever: the container, its output, and how much of it is lost.
    logs: ClassVar[list[tuple[str, str, int]]] = [("first", "epoch 1/2\n", 0)]

    def answer(self, code: int, content: Any, lost: int = 0) -> None:
        """Answer with text or a JSON document; the connection ends ``lost`` bytes before its end."""
        body = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "text/plain" if isinstance(content, str) else "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) - lost])
        self.close_connection = bool(lost)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/version/":
            self.answer(200, {"major": "1", "minor": "37", **dict.fromkeys(_VERSION_KEYS, "")})
        elif path.endswith("/pods"):
            labels = {"batch.kubernetes.io/job-completion-index": "0"}
            metadata = {"name": "run-node-0-0-x", "namespace": "default", "uid": "1", "labels": labels}
            waiting = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": TOO_FEW}
            pending = {"phase": "Pending", "conditions": [waiting]}
            container = {"name": "node", "containerID": self.logs[0][0]}
            required = {"image": "", "imageID": "", "ready": True, "restartCount": 0}
            running = {"phase": "Running", "containerStatuses": [{**container, **required}]}
            pods = [{"metadata": metadata, "status": running}]
            self.answer(200, {"items": [{"metadata": {**metadata, "labels": {}}, "status": pending}, *pods]})
        elif path.endswith("/log"):
            _, output, lost = self.logs.pop(0) if len(self.logs) > 1 else self.logs[0]
            self.answer(200, output, lost)
        elif path in self.objects:
            self.answer(200, self.objects[path])
        else:
            self.answer(404, {"message": "not found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append(f"POST {self.path}")
        if self.refuses:
            self.answer(403, {"message": "trainjobs is forbidden"})
            return
        path = f"{self.path}/{body['metadata']['name']}"
        conditions = [{"type": "Complete", "status": "True"}] if "complete" in path else []
        self.objects[path] = {**body, "status": {"conditions": conditions}}
        self.answer(201, body)

    def do_DELETE(self) -> None:
        self.requests.append(f"DELETE {self.path}")
        self.answer(200, self.objects.pop(self.path.partition("?")[0]))

    def log_message(self, *arguments: Any) -> None: ...


_VERSION_KEYS = ("gitVersion", "gitCommit", "gitTreeState", "buildDate", "goVersion", "compiler", "platform")


@pytest.fixture
def api_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[ApiServer]]:
    """A server that the kubeconfig names."""
    ApiServer.objects.clear()
    ApiServer.requests.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), ApiServer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    write_kubeconfig(tmp_path / "kubeconfig", server.server_port, monkeypatch)
    yield ApiServer
    server.shutdown()
    thread.join()
    server.server_close()


def write_kubeconfig(file: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = {"name": "here", "cluster": {"server": f"http://127.0.0.1:{port}"}}
    context = {"name": "here", "context": {"cluster": "here", "user": "me"}}
    content = {"clusters": [cluster], "contexts": [context], "users": [{"name": "me", "user": {}}]}
    file.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config", "current-context": "here", **content}))
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(file))
    monkeypatch.chdir(file.parent)


@pytest.mark.slow
def test_a_job_is_created_followed_shown_and_deleted(api_server: type[ApiServer], capsys: PRINTED) -> None:
    path = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/default/trainjobs"
    job = (*K8S, "--k8s-volume", "runs")
    assert main(["train", TOY, *job, "--save-dir", "complete"]) == 0
    output = capsys.readouterr().out
    assert "epoch 1/2\n" in output, "the pod's log was followed"
    assert f"waits for a node: {TOO_FEW}\n" in output
    assert api_server.requests == [f"POST {path}"]
    assert json.loads(Path("complete/job.json").read_text()) == {"engine": "k8s", "id": "TrainJob/default/complete"}
    assert RunDir(Path("complete")).read().status == "completed"
    # One that runs: the following ends when it is deleted.
    follower = threading.Thread(target=main, args=(["train", TOY, *job, "--save-dir", "running"],))
    follower.start()
    while not Path("running/job.json").exists():
        assert follower.is_alive()
        follower.join(0.05)
    capsys.readouterr()
    assert main(["show", "running"]) == 0
    assert "TrainJob/default/running, Running" in capsys.readouterr().out
    assert main(["stop", "running"]) == 0
    follower.join()
    assert api_server.requests[-1].startswith(f"DELETE {path}/running")
    assert "propagationPolicy=Foreground" in api_server.requests[-1]
    assert RunDir(Path("running")).read().status == "stopped"
    assert main(["train", TOY, *job, "--save-dir", "running"]) == 2, "there is a run already"
    Path("running").rename("complete-2")
    assert main(["train", TOY, *job, "--save-dir", "complete-2", "--resume"]) == 0
    assert api_server.requests[-1] == f"POST {path}"


def test_following_survives_broken_connections_and_a_new_container(
    api_server: type[ApiServer], capsys: PRINTED, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each line is shown once; a character that is cut in two, too."""
    monkeypatch.setattr("lockstep.launch.engines.k8s._PODS_INTERVAL_S", 0.01)
    before = "α 1\nα 2\n"
    after = "attempt 2\n"
    answers = [("first", before, 6), ("first", before, 1), ("first", before, 0), ("second", after, 0)]
    monkeypatch.setattr(api_server, "logs", answers)
    handle = JobHandle(engine="k8s", id="TrainJob/default/run", run_folder=tmp_path)
    output = ""
    for text in find_engine("k8s").make().logs(handle):
        output += text
        if after in output:
            break
    lines = [line for line in output.splitlines() if line.startswith(("α", "attempt"))]
    assert lines == ["α 1", "α 2", "attempt 2"]
    assert output.count("the pods of TrainJob/default/run") <= 2, "each reason is told once"


def test_without_a_cluster_each_error_is_one_clear_text(
    api_server: type[ApiServer], capsys: PRINTED, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: str) -> str:
        capsys.readouterr()
        assert main(["train", TOY, *K8S, "--k8s-volume", "runs", "--save-dir", "run", *arguments]) == 2
        error = capsys.readouterr().err
        assert error.count("error:") == error.count("fix:") == 1
        assert "Traceback" not in error
        assert not Path("run").exists()
        return error

    monkeypatch.setattr(api_server, "refuses", True)
    assert "trainjobs is forbidden" in refused()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    write_kubeconfig(tmp_path / "silent", port, monkeypatch)
    assert str(port) in refused()
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "missing"))
    assert "KUBERNETES_SERVICE_HOST" not in os.environ
    assert "Kubernetes" in refused()
