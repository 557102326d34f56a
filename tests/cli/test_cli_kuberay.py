"""The manifest for KubeRay, checked against the `RayJob` of ray.io/v1 by its documentation."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from headwater.config import load_params

WORDS = (
    *("--num_csx=6", "--num_memx=2", "--model_dir=/data/runs/first", "--image=registry/headwater:1"),
    *("--memory=48GiB", "--volume=shared=/data", "--ranks_per_node=4", "--cpus_per_rank=3"),
)


@pytest.fixture
def write(headwater, params):
    """Writes a manifest: exit code, its documents by kind, and what else was said."""

    def run(*words):
        code, output, error = headwater("ray", "manifest", params, *WORDS, *words)
        return code, {each["kind"]: each for each in yaml.safe_load_all(output)}, error

    return run


def pods(job):
    """The pod templates: of the head, and of those that compute."""
    spec = job["spec"]["rayClusterSpec"]
    return [group["template"]["spec"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]


def test_the_manifest_has_the_pods_that_the_ranks_need(write):
    code, documents, _ = write("--retries=5", "--name=first")
    assert code == 0
    job = documents["RayJob"]
    assert job["apiVersion"] == "ray.io/v1"
    assert job["metadata"]["name"] == "first"
    assert job["spec"]["shutdownAfterJobFinishes"] is True
    assert job["spec"]["backoffLimit"] == 5
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0", "no rank is placed on the head"
    (group,) = cluster["workerGroupSpecs"]
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] == 2
    assert group["rayStartParams"]["num-cpus"] == "12"
    for pod in pods(job):
        assert pod["restartPolicy"] == "Never"
        assert [each["image"] for each in pod["containers"]] == ["registry/headwater:1"]
    resources = pods(job)[1]["containers"][0]["resources"]
    assert resources["limits"] == resources["requests"] == {"cpu": "12", "memory": "49152Mi"}


def test_pods_have_a_gpu_for_each_rank_on_request(write):
    def of(documents):
        (group,) = documents["RayJob"]["spec"]["rayClusterSpec"]["workerGroupSpecs"]
        (container,) = group["template"]["spec"]["containers"]
        return group["rayStartParams"].get("num-gpus"), container["resources"]["limits"].get("nvidia.com/gpu")

    assert of(write()[1]) == (None, None)
    assert of(write("--gpus_per_rank=1")[1]) == ("4", "4")


def test_ray_start_parameters_are_text(write):
    cluster = write()[1]["RayJob"]["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert all(type(value) is str for value in group["rayStartParams"].values())


def test_every_pod_has_the_volumes_and_the_params(write):
    code, documents, _ = write("--volume=corpus=/corpus")
    assert code == 0
    job, map_name = documents["RayJob"], documents["ConfigMap"]["metadata"]["name"]
    for pod in pods(job):
        sources = {each.pop("name"): each for each in pod["volumes"]}
        (container,) = pod["containers"]
        found = {each["mountPath"]: sources[each["name"]] for each in container["volumeMounts"]}
        assert found == {
            "/data": {"persistentVolumeClaim": {"claimName": "shared"}},
            "/corpus": {"persistentVolumeClaim": {"claimName": "corpus"}},
            "/etc/headwater": {"configMap": {"name": map_name}},
        }


def test_the_command_in_the_manifest_trains_with_the_same_params(write, headwater, params, tmp_path):
    _, documents, _ = write("trainer.init.seed=17")
    words = shlex.split(documents["RayJob"]["spec"]["entrypoint"])
    assert words[:4] == ["headwater", "ray", "fit", "/etc/headwater/params.yaml"]
    ((name, text),) = documents["ConfigMap"]["data"].items()
    assert name == "params.yaml"
    path = tmp_path / name
    path.write_text(text)
    config = load_params(path)
    assert config == load_params(params, ["model_dir=/data/runs/first", "num_csx=6", "num_memx=2", "seed=17"])
    _, _, error = headwater("ray", "fit", path, *words[4:], "--address=127.0.0.1:1")
    assert "nothing answers at 127.0.0.1:1" in error, "all but the cluster is there"


def test_a_note_lists_paths_that_the_image_must_contain(write, data):
    assert f"note: {data}/train is not in a volume, so the image must contain it" in write()[2]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--model_dir=/elsewhere/run", "model_dir /elsewhere/run is not in a volume"),
        ("--model_dir=/database/run", "model_dir /database/run is not in a volume"),
        ("--model_dir=/data/../run", "run is not in a volume"),
        ("--model_dir=runs/first", "runs/first is not in a volume"),
        ("--image=", "expected a container image, got an empty name"),
        ("--name=First", "'First' is not a valid name"),
        ("--name=" + 48 * "a", "is not a valid name"),
        ("--volume=/data", "expected CLAIM=PATH, got '/data'"),
        ("--volume=shared=data", "expected CLAIM=PATH, got 'shared=data'"),
        ("--memory=much", "expected a size in bytes, got 'much'"),
        ("--memory=64", "expected at least 1 GiB of memory per rank, got 64 B for 4 ranks"),
        ("--ranks_per_node=3", "8 ranks cannot be divided equally into nodes of 3"),
        ("--retries=-1", "--retries >= 0, got -1"),
    ],
)
def test_invalid_combinations_are_refused(write, word, message):
    code, documents, error = write(word)
    assert code == 2
    assert message in error
    assert not documents


def test_missing_options_are_errors(headwater, params):
    code, _, error = headwater("ray", "manifest", params)
    assert code == 2
    for option in ("--image", "--memory", "--volume", "--ranks_per_node"):
        assert option in error


@pytest.mark.parametrize(("command", "code"), [("fit", 2), ("manifest", 0)])
def test_the_commands_of_the_page(headwater, params, command, code, monkeypatch):
    page = (Path(__file__).resolve().parents[2] / "docs/ray.md").read_text()
    (line, *_) = re.findall(rf"^headwater (ray {command} .*?[^\\])$", page, re.MULTILINE | re.DOTALL)
    words = shlex.split(line.replace("\\\n", " ").partition(">")[0], comments=True)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    found, output, error = headwater(*(str(params) if word == "my_params.yaml" else word for word in words))
    assert found == code, error
    assert output if code == 0 else "nothing answers at 127.0.0.1:1" in error
