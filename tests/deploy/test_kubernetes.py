"""The manifests as `kubectl kustomize` renders them: published schemas, flags, and what belongs
together.

Kubernetes' own kinds are checked against its published schemas (kubernetes-validate), those of KEDA
and the Prometheus operator against models generated from their resource definitions (cloudcoil), an
InferencePool by the schema below.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from foredraft.config.services import DraftConfig, GatewayConfig, VerifyConfig
from gateway import metrics as gateway_metrics
from testing import command_lines, tools
from testing.dockerfile import stages

KUBERNETES = "1.34"  # the first with DRA in v1
ON_CPUS = ("cpu", "cpu-ranks", "leader-worker-set")
OVERLAYS = sorted(path.name for path in (tools.ROOT / "k8s" / "overlays").iterdir())
CUSTOM = {
    ("keda.sh/v1alpha1", "ScaledObject"): "cloudcoil.models.keda.v1alpha1",
    ("monitoring.coreos.com/v1", "PodMonitor"): "cloudcoil.models.prometheus_operator.v1",
    ("monitoring.coreos.com/v1", "PrometheusRule"): "cloudcoil.models.prometheus_operator.v1",
}
# After the API reference of inference.networking.k8s.io/v1; no package here carries the definition
# itself.
INFERENCE_POOL = {
    "type": "object",
    "additionalProperties": False,
    "required": ["selector", "targetPorts", "endpointPickerRef"],
    "properties": {
        "selector": {
            "type": "object",
            "additionalProperties": False,
            "required": ["matchLabels"],
            "properties": {
                "matchLabels": {"type": "object", "additionalProperties": {"type": "string"}}
            },
        },
        "targetPorts": {
            "type": "array",
            "minItems": 1,
            "maxItems": 8,
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["number"],
                "properties": {"number": {"type": "integer", "minimum": 1, "maximum": 65535}},
            },
        },
        "endpointPickerRef": {
            "type": "object",
            "additionalProperties": False,
            "required": ["name", "port"],
            "properties": {
                "group": {"type": "string"},
                "kind": {"type": "string"},
                "name": {"type": "string"},
                "port": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {"number": {"type": "integer"}},
                },
                "failureMode": {"enum": ["FailOpen", "FailClose"]},
            },
        },
    },
}

# After the API reference of leaderworkerset.x-k8s.io/v1; pods are checked as those of Deployments.
LEADER_WORKER_SET = {
    "type": "object",
    "additionalProperties": False,
    "required": ["leaderWorkerTemplate"],
    "properties": {
        "replicas": {"type": "integer", "minimum": 0},
        "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
        "rolloutStrategy": {
            "type": "object",
            "additionalProperties": False,
            "required": ["type"],
            "properties": {
                "type": {"const": "RollingUpdate"},
                "rollingUpdateConfiguration": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "maxUnavailable": {"type": "integer"},
                        "maxSurge": {"type": "integer"},
                    },
                },
            },
        },
        "leaderWorkerTemplate": {
            "type": "object",
            "additionalProperties": False,
            "required": ["workerTemplate", "size"],
            "properties": {
                "leaderTemplate": {"type": "object"},
                "workerTemplate": {"type": "object"},
                "size": {"type": "integer", "minimum": 1},
                "restartPolicy": {"enum": ["RecreateGroupOnPodRestart", "None"]},
            },
        },
    },
}

Resource = dict[str, Any]


@pytest.fixture(scope="module", params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def resources(overlay: str) -> list[Resource]:
    return render(overlay)


def render(overlay: str) -> list[Resource]:
    text = tools.run("kubectl", "kustomize", f"k8s/overlays/{overlay}")
    return list(yaml.safe_load_all(text))


def named(resources: list[Resource], kind: str, name: str) -> Resource:
    (found,) = (r for r in resources if r["kind"] == kind and r["metadata"]["name"] == name)
    return found


def deployments(resources: list[Resource]) -> list[Resource]:
    """Returns deployments, and the pods of a LeaderWorkerSet as two of them: the leader is the
    verifier.
    """
    found = [resource for resource in resources if resource["kind"] == "Deployment"]
    for one in resources:
        if one["kind"] == "LeaderWorkerSet":
            templates = one["spec"]["leaderWorkerTemplate"]
            for name, part in (("foredraft-verifier", "leader"), ("foredraft-rank", "worker")):
                template = templates[f"{part}Template"]
                found.append(
                    {
                        "apiVersion": "apps/v1",
                        "kind": "Deployment",
                        "metadata": {"name": name},
                        "spec": {
                            "template": template,
                            "selector": {"matchLabels": template["metadata"]["labels"]},
                        },
                    }
                )
    return found


def verifier_pod(resources: list[Resource], name: str = "foredraft-verifier") -> dict[str, Any]:
    return named(deployments(resources), "Deployment", name)["spec"]["template"]["spec"]


def containers(resource: Resource) -> list[dict[str, Any]]:
    pod = resource["spec"]["template"]["spec"]
    return [*pod.get("initContainers", ()), *pod["containers"]]


def test_every_resource_fits_its_published_schema(resources: list[Resource]) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    jsonschema = pytest.importorskip("jsonschema")
    for resource in resources:
        kind = (resource["apiVersion"], resource["kind"])
        if kind[1] == "InferencePool":
            assert kind[0] == "inference.networking.k8s.io/v1"
            jsonschema.validate(resource["spec"], INFERENCE_POOL)
        elif kind[1] == "LeaderWorkerSet":
            assert kind[0] == "leaderworkerset.x-k8s.io/v1"
            jsonschema.validate(resource["spec"], LEADER_WORKER_SET)
            for pods in deployments([resource]):
                validate.validate(pods, KUBERNETES, strict=True)
        elif kind in CUSTOM:
            model = getattr(pytest.importorskip(CUSTOM[kind]), kind[1])
            assert_known(model, resource)
        else:
            validate.validate(resource, KUBERNETES, strict=True)


def assert_known(model: Any, given: Resource) -> None:
    """Fails for a resource that the model refuses, or would take in part."""
    read = model.model_validate(given).model_dump(mode="json", by_alias=True, exclude_none=True)
    assert_kept(given, read)


def assert_kept(given: Any, read: Any, path: str = "") -> None:
    """Fails for a field that the model did not know and so dropped."""
    if isinstance(given, dict):
        for key, value in given.items():
            assert key in read, f"{path}.{key} is no field"
            assert_kept(value, read[key], f"{path}.{key}")
    elif isinstance(given, list):
        for index, value in enumerate(given):
            assert_kept(value, read[index], f"{path}[{index}]")


def test_wrong_fields_are_found(resources: list[Resource]) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    wrong = {**deployments(resources)[0]}
    wrong["spec"] = {**wrong["spec"], "replica": 3}
    with pytest.raises(validate.ValidationError):
        validate.validate(wrong, KUBERNETES, strict=True)
    model = pytest.importorskip("cloudcoil.models.keda.v1alpha1").ScaledObject
    scaler = {
        "metadata": {"name": "x"},
        "spec": {"scaleTargetRef": {"name": "x"}, "triggers": [], "typo": 1},
    }
    with pytest.raises((AssertionError, ValueError), match="typo"):
        assert_known(model, scaler)


def test_flags_and_variables_are_ones_that_the_code_reads(
    resources: list[Resource], monkeypatch: pytest.MonkeyPatch
) -> None:
    configs: dict[str, Any] = {}
    for deployment in deployments(resources):
        for container in containers(deployment):
            environment = {item["name"]: item["value"] for item in container.get("env", ())}
            for source in container.get("envFrom", ()):
                environment |= named(resources, "ConfigMap", source["configMapRef"]["name"])["data"]
            argv = [*container["command"], *container.get("args", ())]
            configs[container["name"]] = command_lines.check(argv, environment, monkeypatch)
    if "server" in configs:
        assert configs["server"].device == "cuda"
        return
    verifier, draft, gateway = (configs[name] for name in ("verifier", "draft", "gateway"))
    assert isinstance(verifier, VerifyConfig)
    assert isinstance(draft, DraftConfig)
    assert isinstance(gateway, GatewayConfig)
    assert verifier.draft == (draft.listen,)
    shared = ("model_path", "speculative_algorithm", "speculative_draft_model_path", "device")
    assert [getattr(verifier, name) for name in shared] == [getattr(draft, name) for name in shared]


def test_probes_and_ports_are_where_services_listen(
    resources: list[Resource], monkeypatch: pytest.MonkeyPatch
) -> None:
    for deployment in deployments(resources):
        for container in containers(deployment):
            ports = {port["name"]: port["containerPort"] for port in container["ports"]}
            given = dict(
                argument.removeprefix("--").split("=", 1) for argument in container["args"]
            )
            config = command_lines.check(
                [*container["command"], *container["args"]], {}, monkeypatch
            )
            listening = set()
            for name in (
                "port",
                "grpc_port",
                "verify_metrics_port",
                "draft_metrics_port",
                "metrics_port",
            ):
                if getattr(config, name, None):
                    listening.add(getattr(config, name))
            if (listen := given.get("listen", "unix:")) and not listen.startswith("unix:"):
                listening.add(int(listen.rpartition(":")[2]))
            assert set(ports.values()) <= listening
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                described = container.get(probe, {})
                if "grpc" in described:
                    assert described["grpc"]["port"] in ports.values()
                elif "httpGet" in described:
                    assert described["httpGet"]["port"] in ports
                elif "exec" in described:
                    command = described["exec"]["command"]
                    assert command[:3] == ["python", "-m", "foredraft.rpc.healthcheck"]
                    assert command[3] == given["listen"]


def test_pods_have_time_to_drain(resources: list[Resource]) -> None:
    for deployment in deployments(resources):
        pod = deployment["spec"]["template"]["spec"]
        for container in pod["containers"]:
            sleep = container["lifecycle"]["preStop"]["sleep"]["seconds"]
            drain = next(
                float(flag.partition("=")[2])
                for flag in container["args"]
                if flag.startswith("--drain-timeout=")
            )
            assert pod["terminationGracePeriodSeconds"] >= sleep + drain + 5


def test_pods_are_hardened(resources: list[Resource]) -> None:
    for deployment in deployments(resources):
        pod = deployment["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
        assert not pod["automountServiceAccountToken"]
        assert not {"hostIPC", "hostPID", "hostNetwork"} & pod.keys()
        for container in containers(deployment):
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"]
            assert not context["allowPrivilegeEscalation"]
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert "memory" in container["resources"]["limits"]


def test_verifier_and_draft_share_what_they_must(resources: list[Resource], overlay: str) -> None:
    if overlay == "gpu-device-plugin":
        (server,) = containers(named(resources, "Deployment", "foredraft-server"))
        assert server["resources"]["limits"]["nvidia.com/gpu"] == 1
        return
    pod = verifier_pod(resources)
    assert pod["shareProcessNamespace"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    verifier = next(c for c in pod["containers"] if c["name"] == "verifier")
    (draft,) = pod["initContainers"]
    assert draft["restartPolicy"] == "Always"
    assert verifier["volumeMounts"] == draft["volumeMounts"]
    assert verifier["image"] == draft["image"]
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in verifier["volumeMounts"]}
    for path in ("/run/foredraft", "/dev/shm"):
        assert mounts[path]["emptyDir"]["medium"] == "Memory"
    if overlay in ON_CPUS:
        assert "resourceClaims" not in pod
        return
    assert verifier["resources"]["claims"] == draft["resources"]["claims"] == [{"name": "gpu"}]
    (claim,) = pod["resourceClaims"]
    template = named(resources, "ResourceClaimTemplate", claim["resourceClaimTemplateName"])
    devices = template["spec"]["spec"]["devices"]
    num_gpus = 2 if overlay == "gpu-ranks" else 1
    assert devices["requests"][0]["exactly"]["count"] == num_gpus
    num_ranks = num_gpus
    if overlay == "leader-worker-set-gpu":
        num_ranks = 2
        rank = verifier_pod(resources, "foredraft-rank")
        assert rank["resourceClaims"] == pod["resourceClaims"]
        assert rank["containers"][0]["resources"]["claims"] == verifier["resources"]["claims"]
        assert rank["containers"][0]["image"] == verifier["image"]
    assert (f"--tensor-parallel-size={num_ranks}" in verifier["args"]) == (num_ranks > 1)
    strategies = [
        part["opaque"]["parameters"]["sharing"]["strategy"] for part in devices.get("config", ())
    ]
    assert strategies == (["MPS"] if overlay == "gpu-mps" else [])


def test_a_verifier_whose_draft_is_away_keeps_its_address(
    resources: list[Resource], overlay: str
) -> None:
    if overlay != "gpu-device-plugin":
        # A sidecar that is not running makes its pod not ready.
        assert named(resources, "Service", "foredraft-verifier")["spec"]["publishNotReadyAddresses"]


def test_gpu_pods_keep_what_they_compiled(resources: list[Resource], overlay: str) -> None:
    name = "foredraft-server" if overlay == "gpu-device-plugin" else "foredraft-verifier"
    pod = verifier_pod(resources, name)
    (cache,) = (volume for volume in pod["volumes"] if volume["name"] == "cache")
    if overlay in ON_CPUS:
        assert cache == {"name": "cache", "emptyDir": {}}
        return
    assert cache == {
        "name": "cache",
        "persistentVolumeClaim": {"claimName": "foredraft-cache"},
    }
    claim = named(resources, "PersistentVolumeClaim", "foredraft-cache")
    many = overlay == "multi-replica"
    assert claim["spec"]["accessModes"] == ["ReadWriteMany" if many else "ReadWriteOnce"]
    # The image's own setting.
    assert ("ENV", "TRITON_CACHE_DIR=/cache/triton") in stages(tools.ROOT / "Dockerfile")[
        "runtime-cuda"
    ].steps


def test_selectors_find_pods(resources: list[Resource]) -> None:
    pods = [d["spec"]["template"]["metadata"]["labels"] for d in deployments(resources)]
    for resource in resources:
        spec = resource.get("spec", {})
        selector = spec.get("selector") or spec.get("podSelector")
        if resource["kind"] in (
            "Deployment",
            "PodDisruptionBudget",
            "NetworkPolicy",
            "InferencePool",
            "PodMonitor",
        ):
            selector = selector.get("matchLabels", selector)
        expressions = (selector or {}).get("matchExpressions", ())
        for wanted in expressions:
            for value in wanted["values"]:
                assert any(labels.get(wanted["key"]) == value for labels in pods), value
        if selector and not expressions:
            found = [labels for labels in pods if selector.items() <= labels.items()]
            assert found, f"{resource['kind']} {resource['metadata']['name']} selects nothing"


def test_images_are_targets_of_the_dockerfile(resources: list[Resource]) -> None:
    targets = set(stages(tools.ROOT / "Dockerfile"))
    for deployment in deployments(resources):
        for container in containers(deployment):
            name, _, tag = container["image"].partition(":")
            if name == "foredraft-gateway":
                assert tag == "dev"
            else:
                assert tag.rpartition("-")[2] in targets


@pytest.mark.parametrize("overlay", ["leader-worker-set", "leader-worker-set-gpu"])
def test_ranks_are_as_many_in_all_pods_of_a_group(
    monkeypatch: pytest.MonkeyPatch, overlay: str
) -> None:
    """Every pod takes part, and has the same flags; the gateways' Service finds leaders alone."""
    resources = render(overlay)
    [group] = [one for one in resources if one["kind"] == "LeaderWorkerSet"]
    size = group["spec"]["leaderWorkerTemplate"]["size"]
    environ = {"LWS_LEADER_ADDRESS": "a.b", "LWS_GROUP_SIZE": str(size), "LWS_WORKER_INDEX": "0"}
    for name, container in (("foredraft-verifier", "verifier"), ("foredraft-rank", "rank")):
        [found] = [c for c in verifier_pod(resources, name)["containers"] if c["name"] == container]
        config = command_lines.check([*found["command"], *found["args"]], {}, monkeypatch)
        assert isinstance(config, VerifyConfig)
        assert config.tensor_parallel_size == 2
        assert config.nodes(environ).count == size
    selector = named(resources, "Service", "foredraft-verifier")["spec"]["selector"]
    worker = group["spec"]["leaderWorkerTemplate"]["workerTemplate"]["metadata"]["labels"]
    assert not selector.items() <= worker.items()


def test_replicas_scale_and_are_picked_by_metrics_that_exist() -> None:
    page = (tools.ROOT / "docs" / "metrics.md").read_text()
    resources = render("multi-replica")
    assert not [r for r in resources if r["kind"] == "HorizontalPodAutoscaler"]
    scalers = [r for r in resources if r["kind"] == "ScaledObject"]
    targets = {d["metadata"]["name"] for d in deployments(resources)}
    for scaler in scalers:
        assert scaler["spec"]["scaleTargetRef"]["name"] in targets
        for trigger in scaler["spec"]["triggers"]:
            query = trigger["metadata"]["query"]
            metric = next(
                word
                for word in query.replace("(", " ").replace("{", " ").split()
                if "foredraft_" in word
            )
            assert f"`{metric}`" in page
            assert 'namespace="foredraft"' in query
    pool = named(resources, "InferencePool", "foredraft")
    pod = named(resources, "Deployment", "foredraft-verifier")["spec"]["template"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    ports = {port["containerPort"] for c in pod["spec"]["containers"] for port in c["ports"]}
    assert {port["number"] for port in pool["spec"]["targetPorts"]} <= ports
    for gauge in (gateway_metrics.waiting_requests, gateway_metrics.kv_usage):
        name = next(iter(gauge.collect())).name
        assert name in (tools.ROOT / "k8s/components/inference-pool/pool.yaml").read_text()


@pytest.mark.parametrize(
    ("overlay", "deployment"),
    [("cpu", "foredraft-gateway"), ("gpu-device-plugin", "foredraft-server")],
)
def test_gateways_with_a_key_are_scraped_with_it(
    tmp_path: Path, overlay: str, deployment: str
) -> None:
    def relative(place: str) -> str:
        return os.path.relpath(tools.ROOT / "k8s" / place, tmp_path)

    whole = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [relative(f"overlays/{overlay}")],
        "components": [relative("components/monitoring"), relative("components/api-key")],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(whole))
    resources = list(yaml.safe_load_all(tools.run("kubectl", "kustomize", str(tmp_path))))
    keyed = {
        container["name"]: variable["valueFrom"]["secretKeyRef"]
        for container in containers(named(resources, "Deployment", deployment))
        for variable in container.get("env", ())
        if variable["name"] == "FOREDRAFT_API_KEY"
    }
    assert len(keyed) == 1
    monitor = named(resources, "PodMonitor", "foredraft-gateway")
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    assert [endpoint["authorization"]["credentials"]] == list(keyed.values())


def test_the_page_names_every_overlay_and_component() -> None:
    page = (tools.ROOT / "docs" / "kubernetes.md").read_text()
    names = [f"k8s/overlays/{name}" for name in OVERLAYS]
    names += [f"components/{path.name}" for path in (tools.ROOT / "k8s/components").iterdir()]
    for name in names:
        assert name in page, name
