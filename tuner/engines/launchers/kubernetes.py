"""Emits plain Kubernetes objects: `deployment.yaml` and `bench-job.yaml`.

    instance on one machine       Deployment, one replica per instance, strategy Recreate
    instance on several machines  LeaderWorkerSet (leaderworkerset.x-k8s.io/v1), one pod per machine
    all of one machine            Deployment of one container with all devices and the router, where
                                  KV caches are copied from device to device inside it; of several
                                  that share stages, LeaderWorkerSet
    router                        Deployment that finds the leaders' pods by label, with a role that
                                  may list pods; TensorRT-LLM's uses a Service per group

Devices are requested by the name of their vendor's plugin
(tuner/catalog/serve_rules/vendors.py). Sources: Kubernetes apps/v1, the LeaderWorkerSet resource
definition and labels of kubernetes-sigs/lws, docs.sglang.io (service discovery of the gateway).

Not covered: TensorRT-LLM over several machines, whose ranks MPI starts; use `slurm` or `dynamo`.
"""

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any, Final

from tuner.config.serve import Role
from tuner.engines.files import EmittedFile
from tuner.engines.launchers.autoscalers import (
    PORT_NAME,
    autoscaler_files,
    check_scalable,
    disruption_budget,
    with_drain,
)
from tuner.engines.launchers.benchmark import (
    TRACE_FORM,
    benchmark_aiperf_bash,
    benchmark_vllm_bash,
    is_drawn_by_vllm,
    offered_traffic,
    planned_requests,
    requests_files,
)
from tuner.engines.launchers.benchmark_requests import NAME, BenchmarkRequests
from tuner.engines.launchers.pods import (
    MOUNT,
    Object,
    app_name,
    config_map,
    field,
    literal,
    placed_on,
    pod,
    pod_notes,
    variables,
    weights,
    yaml_text,
)
from tuner.engines.serving.command import BOOTSTRAP_OFFSET, FIRST_PORT
from tuner.engines.serving.engines import MPI_ENGINES, engine_files, server_bash
from tuner.engines.serving.placement import ServedPlacement, placement_notes
from tuner.engines.serving.router import (
    ROUTER_PORT,
    by_nginx,
    chosen_router,
    discovering_words,
    engine_gateway,
    needs_router,
    router_bash,
)
from tuner.engines.serving.scripts import emit as script_files
from tuner.engines.serving.shape import (
    MACHINE,
    GroupShape,
    group_release,
    group_shapes,
    one_machine,
    vendor_traits,
)
from tuner.engines.vllm.capabilities import VLLM_0_33
from tuner.errors import UnknownTargetError
from tuner.plans.serve import VerifiedServing

_STRICT: Final = "set -euo pipefail\n"
_BY_GROUP: Final = """\
export NODE_RANK="$LWS_WORKER_INDEX" MASTER_ADDR="$LWS_LEADER_ADDRESS" NNODES="$LWS_GROUP_SIZE"
"""
_AIPERF: Final = "command -v aiperf > /dev/null || pip install --quiet aiperf==0.13.0\n"
_TRACE: Final = "/traces/requests.jsonl"


def emit(verified: VerifiedServing, placement: ServedPlacement | None) -> tuple[EmittedFile, ...]:
    """Return the objects of the deployment and of its benchmark.

    Raises:
        UnknownTargetError: the engine's instances need MPI across machines, or an autoscaler could
            not add to them.
    """
    check_scalable(verified)
    app, is_scaled = app_name(verified), verified.autoscaling is not None
    files, machine = engine_files(verified, placement), one_machine(verified)
    shapes = group_shapes(verified)
    engine = verified.plan.goal.engine.name
    wide = next((shape for shape in shapes if shape.nodes > 1), None)
    if wide is not None and engine in MPI_ENGINES:
        raise UnknownTargetError(
            f"emit: kubernetes starts no {engine} whose {wide.name} instances span {wide.nodes}"
            " machines by MPI; emit slurm or dynamo"
        )
    objects = [
        *((config_map(f"{app}-files", files=files),) if files else ()),
        *(_instances(verified, shape, placement, app=app, files=bool(files)) for shape in shapes),
        *(_service(verified, shape, app=app) for shape in shapes),
        *(disruption_budget(shape, app=app) for shape in shapes if is_scaled),
        *(_router(verified, app=app) if needs_router(verified) else ()),
    ]
    if machine is not None:
        of_client = ("bench", "expected")
        made = script_files(verified, placement)
        scripts = [file for file in made if not file.path.name.startswith(of_client)]
        objects = [
            config_map(f"{app}-files", files=scripts),
            _instances(verified, machine, placement, app=app, files=True),
            _service_object(app, selector={"app": app}, port=ROUTER_PORT),
        ]
    notes = (
        *pod_notes(verified),
        *placement_notes(verified, placement),
        *(
            ("The autoscaler was planned for other instances than these, whose number is fixed.",)
            if verified.plan.autoscaling is not None and not is_scaled
            else ()
        ),
        "Then: kubectl apply -f deployment.yaml",
    )
    requests = mounted_requests(verified)
    return (
        EmittedFile(
            path=PurePosixPath("deployment.yaml"),
            text=yaml_text(verified, notes=notes, objects=objects),
        ),
        EmittedFile(
            path=PurePosixPath("bench-job.yaml"),
            text=yaml_text(
                verified,
                notes=benchmark_notes(verified, once="the deployment"),
                objects=[benchmark_job(verified, requests, url=f"http://{_entrance(verified)}")],
            ),
        ),
        *autoscaler_files(verified, app=app),
        *requests_files(requests),
    )


def benchmark_notes(verified: VerifiedServing, *, once: str) -> tuple[str, ...]:
    """Return the instructions for the benchmark's job."""
    notes = ["Put the path or name of the weights into MODEL, for their tokenizer."]
    if verified.plan.goal.traffic.trace is not None:
        notes += [f"Mount the recorded requests as {_TRACE} into the container.", TRACE_FORM]
    elif not is_drawn_by_vllm(offered_traffic(verified)):
        notes.append(f"Mount {NAME} of this folder as {_TRACE} into the container.")
    return (*notes, f"kubectl apply -f bench-job.yaml once {once} is ready.")


def mounted_requests(verified: VerifiedServing) -> BenchmarkRequests | None:
    """Return the requests of the file that is mounted into the benchmark's job, if it needs one."""
    return None if is_drawn_by_vllm(offered_traffic(verified)) else planned_requests(verified)


def benchmark_job(
    verified: VerifiedServing, requests: BenchmarkRequests | None, *, url: str
) -> Object:
    """Return the Job that runs a benchmark against the address.

    Args:
        verified: the deployment.
        requests: its `mounted_requests`.
        url: of the router, or of the only instance.
    """
    is_file = not is_drawn_by_vllm(offered_traffic(verified))
    script = (
        benchmark_aiperf_bash(verified, requests)
        if is_file
        else benchmark_vllm_bash(verified, None)
    )
    values: dict[str, str | Object] = {
        "MODEL": literal(verified.plan.model.name),
        "BASE_URL": url,
    }
    if is_file:
        values["TRACE"] = _TRACE
    container = {
        "name": "bench",
        "image": VLLM_0_33.image,
        "command": ["bash", "-c", _STRICT + (_AIPERF if is_file else "") + script],
        "env": variables(values),
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": f"{app_name(verified)}-bench"},
        "spec": {
            "backoffLimit": 0,
            "template": {"spec": {"restartPolicy": "Never", "containers": [container]}},
        },
    }


def _instances(
    verified: VerifiedServing,
    shape: GroupShape,
    placement: ServedPlacement | None,
    *,
    app: str,
    files: bool,
) -> Object:
    name = f"{app}-{shape.name}"
    labels = {"app": app, "role": shape.group.role.value, "group": shape.name}
    container = _container(verified, shape, placement)
    spec = pod(
        container,
        devices=shape.devices_per_node,
        resource=vendor_traits(verified, shape.group).resource,
        files=f"{app}-files" if files else None,
    ) | placed_on(verified, shape.group.pool)
    spec = with_drain(verified, shape, spec)
    metadata: Object = {"labels": labels} | _annotations(verified, shape)
    replicas = {} if verified.autoscaling is not None else {"replicas": shape.group.count}
    if shape.nodes == 1:
        return {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": name, "labels": labels},
            "spec": {
                **replicas,
                # A rolling update would request more devices than the plan has.
                "strategy": {"type": "Recreate"},
                "selector": {"matchLabels": labels},
                "template": {
                    "metadata": metadata,
                    "spec": _with_readiness_probe(spec, port=_port(shape)),
                },
            },
        }
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            **replicas,
            "leaderWorkerTemplate": {
                "size": shape.nodes,
                "restartPolicy": "RecreateGroupOnPodRestart",
                # Only leaders have the labels that router and Service select.
                "leaderTemplate": {
                    "metadata": metadata,
                    "spec": _with_readiness_probe(spec, port=_port(shape)),
                },
                "workerTemplate": {"spec": spec},
            },
        },
    }


def _container(
    verified: VerifiedServing, shape: GroupShape, placement: ServedPlacement | None
) -> Object:
    values: dict[str, str | Object] = {
        **weights(verified),
        "PORT": str(FIRST_PORT),
        "HOST_IP": field("status.podIP"),
        "FILES": MOUNT,
    }
    start = _BY_GROUP if shape.nodes > 1 else ""
    if shape.name == MACHINE:
        gateway = chosen_router(verified).gateway
        install = "" if gateway is None else gateway.install
        script = f"{start}{install}exec bash {MOUNT}/{MACHINE}.sh\n"
    else:
        script = _STRICT + start + server_bash(verified, shape, placement)
    return {
        "name": "engine",
        "image": group_release(verified, shape.group).image,
        "command": ["bash", "-c", script],
        "env": variables(values),
        "ports": [
            {"containerPort": _port(shape)}
            | ({"name": PORT_NAME} if verified.autoscaling is not None else {})
        ],
    }


def _port(shape: GroupShape) -> int:
    return ROUTER_PORT if shape.name == MACHINE else FIRST_PORT


def _with_readiness_probe(spec: Object, *, port: int) -> Object:
    """Return the pod with a readiness probe of its server."""
    probe: dict[str, Any] = {
        "httpGet": {"path": "/health", "port": port},
        "periodSeconds": 10,
        "timeoutSeconds": 10,
    }
    first, *others = spec["containers"]
    return spec | {"containers": [first | {"readinessProbe": probe}, *others]}


def _annotations(verified: VerifiedServing, shape: GroupShape) -> Object:
    """Return the annotation in which a gateway finds the bootstrap port of KV transfers."""
    gateway = engine_gateway(verified)
    if shape.group.role is not Role.PREFILL or gateway is None:
        return {}
    return {"annotations": {gateway.annotation: str(FIRST_PORT + BOOTSTRAP_OFFSET)}}


def _service(verified: VerifiedServing, shape: GroupShape, *, app: str) -> Object:
    """Return the Service of a group; behind nginx it is headless and resolves to every pod."""
    service = _service_object(
        f"{app}-{shape.name}", selector={"app": app, "group": shape.name}, port=FIRST_PORT
    )
    if needs_router(verified) and by_nginx(verified):
        service["spec"]["clusterIP"] = "None"
    return service


def _service_object(name: str, *, selector: dict[str, str], port: int) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"selector": selector, "ports": [{"name": "http", "port": port}]},
    }


def _entrance(verified: VerifiedServing) -> str:
    app = app_name(verified)
    if needs_router(verified):
        return f"{app}:{ROUTER_PORT}"
    return f"{app}-{group_shapes(verified)[0].name}:{FIRST_PORT}"


def _router(verified: VerifiedServing, *, app: str) -> Iterator[Object]:
    name = f"{app}-router"
    labels = {"app": app, "role": "router"}
    yield {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}}
    yield {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": name},
        "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}],
    }
    yield {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name}],
    }
    environment: dict[str, str | Object] = {"NAMESPACE": field("metadata.namespace")}
    if chosen_router(verified).gateway is None:
        for role, urls in _addresses(verified, app=app).items():
            environment[f"{role}_URLS"] = " ".join(urls)
    container = {
        "name": "router",
        "image": _router_image(verified),
        "command": ["bash", "-c", _STRICT + _router_script(verified, app=app)],
        "env": variables(environment),
        "ports": [{"containerPort": ROUTER_PORT}],
    }
    yield {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {"serviceAccountName": name, "containers": [container]},
            },
        },
    }
    yield _service_object(app, selector=labels, port=ROUTER_PORT)


def _router_image(verified: VerifiedServing) -> str:
    group = verified.decision.instances[0]
    return "nginx:1.29" if by_nginx(verified) else group_release(verified, group).image


def _router_script(verified: VerifiedServing, *, app: str) -> str:
    gateway = chosen_router(verified).gateway
    if gateway is None:
        # A Service's name resolves to all instances of a group.
        counts = {name: len(urls) for name, urls in _addresses(verified, app=app).items()}
        return router_bash(verified, counts=counts)
    # A gateway finds the pods by their labels.
    words = discovering_words(verified, gateway, app=app, port=FIRST_PORT)
    return gateway.install + "exec " + " \\\n  ".join(words) + "\n"


def _addresses(verified: VerifiedServing, *, app: str) -> dict[str, list[str]]:
    """Return the addresses of the groups' Services, by the router's lists."""
    addresses: dict[str, list[str]] = {}
    for shape in group_shapes(verified):
        name = "WORKER" if shape.group.role is Role.AGGREGATED else shape.group.role.name
        addresses.setdefault(name, []).append(f"http://{app}-{shape.name}:{FIRST_PORT}")
    return addresses
