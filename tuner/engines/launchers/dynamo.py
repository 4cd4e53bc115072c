"""Emits a `DynamoGraphDeployment` (nvidia.com/v1beta1) for NVIDIA Dynamo's operator.

Every group is a component of the graph; where an instance spans machines, the operator numbers its
pods and adds the rendezvous flags, so they are left out here. Dynamo's runtime images contain their
own releases of the engines. Sources: docs.nvidia.com/dynamo v1.5.0 and deploy/operator/api/v1beta1
of github.com/ai-dynamo/dynamo for the fields, examples/backends/*/deploy/v1beta1 and the wheel of
1.6.1 for the commands.
"""

import json
import re
import shlex
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any, Final

from tuner.catalog.serve_rules.routers import DYNAMO_FRONTEND
from tuner.config.serve import Role
from tuner.devices.datasheet import Vendor
from tuner.engines.files import EmittedFile
from tuner.engines.launchers.benchmark import requests_files
from tuner.engines.launchers.kubernetes import benchmark_job, benchmark_notes, mounted_requests
from tuner.engines.launchers.pods import (
    MOUNT,
    Object,
    app_name,
    config_map,
    placed_on,
    pod,
    pod_notes,
    variables,
    weights,
    yaml_text,
)
from tuner.engines.registry import engine_file
from tuner.engines.serving.command import BOOTSTRAP, BOOTSTRAP_OFFSET, FIRST_PORT, ServerCommand
from tuner.engines.serving.dynamo_worker import DynamoWorker
from tuner.engines.serving.engines import engine_files, server_command
from tuner.engines.serving.placement import ServedPlacement, placement_notes
from tuner.engines.serving.router import ROUTER_PORT
from tuner.engines.serving.shape import (
    GroupShape,
    are_heterogeneous,
    group_release,
    group_shapes,
    is_disaggregated,
    one_machine,
    vendor_traits,
    vendors,
)
from tuner.errors import UnknownTargetError
from tuner.plans.serve import VerifiedServing
from tuner.spec.serving.routers import RouterPolicy

RELEASE: Final = "1.6.1"
"""Release of Dynamo's runtime images."""

_TYPE: Final = {Role.AGGREGATED: "worker", Role.PREFILL: "prefill", Role.DECODE: "decode"}

_OURS: Final = ("--host", "--port", "--model-path", "--config", "--backend", "--enable-scale-out")
"""Options that Dynamo sets itself or that have another name there."""


def emit(verified: VerifiedServing, placement: ServedPlacement | None) -> tuple[EmittedFile, ...]:
    """Return the graph and its benchmark.

    Raises:
        UnknownTargetError: devices are not NVIDIA's, or Dynamo does not have the engine.
    """
    others = [vendor for vendor in vendors(verified) if vendor is not Vendor.NVIDIA]
    if others:
        raise UnknownTargetError(
            f"emit: Dynamo's runtime images are for NVIDIA devices, the plan has those of"
            f" {others[0]}; emit kubernetes or slurm"
        )
    if one_machine(verified) is not None:
        raise UnknownTargetError(
            "emit: dynamo starts every instance in a container of its own, and the plan's KV caches"
            " go from device to device inside one; plan with 'emit: [dynamo]', or emit kubernetes"
        )
    app, worker = app_name(verified), _worker(verified)
    package = () if placement is None else worker.placement_package
    files = (*engine_files(verified, placement), *package)
    graph = {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": app},
        "spec": {
            "backendFramework": verified.plan.goal.engine.name,
            "env": variables(weights(verified)),
            "components": [
                _frontend(verified),
                *(
                    _component(verified, shape, placement, app=app, files=files)
                    for shape in group_shapes(verified)
                ),
            ],
        },
    }
    notes = (
        *pod_notes(verified),
        *placement_notes(verified, placement),
        "Then: kubectl apply -f graph.yaml",
        *(
            (
                "The frontend has no weights: it ignores the size of a worker, so watch small"
                " ones for overload.",
            )
            if are_heterogeneous(verified)
            else ()
        ),
        f"The engine is that of the Dynamo {RELEASE} image; the plan is for"
        f" {group_release(verified, verified.decision.instances[0]).title}.",
    )
    configs = (config_map(f"{app}-files", files=files),) if files else ()
    requests, url = mounted_requests(verified), f"http://{app}-frontend:{ROUTER_PORT}"
    return (
        EmittedFile(
            path=PurePosixPath("graph.yaml"),
            text=yaml_text(verified, notes=notes, objects=(*configs, graph)),
        ),
        EmittedFile(
            path=PurePosixPath("bench-job.yaml"),
            text=yaml_text(
                verified,
                notes=benchmark_notes(verified, once="the graph"),
                objects=[benchmark_job(verified, requests, url=url)],
            ),
        ),
        *requests_files(requests),
    )


def _frontend(verified: VerifiedServing) -> Object:
    mode = _router_mode(verified)
    container = {
        "name": "main",
        "image": _image(verified),
        "command": ["python3", "-m", "dynamo.frontend"],
        "args": ["--http-port", str(ROUTER_PORT), "--router-mode", mode],
    }
    return {
        "name": "frontend",
        "type": "frontend",
        "replicas": 1,
        "podTemplate": {"spec": {"containers": [container]}},
    }


def _component(
    verified: VerifiedServing,
    shape: GroupShape,
    placement: ServedPlacement | None,
    *,
    app: str,
    files: Iterable[EmittedFile],
) -> Object:
    worker = _worker(verified)
    command = server_command(verified, shape, placement)
    is_placed = placement is not None and placement.suits(shape.group)
    container: dict[str, Any] = {
        "name": "main",
        "image": _image(verified),
        "command": ["python3", "-m", f"dynamo.{verified.plan.goal.engine.name}"],
        "args": [
            *(worker.model_option, "$(MODEL)", "--served-model-name", "$(MODEL)"),
            *_arguments(command),
            *_role(worker, shape),
            *_cache_events(verified, shape),
        ],
    }
    environment: dict[str, str | Object] = {
        name: value for name, value in command.environment.items() if "$" not in value
    }
    if is_placed and worker.placement_package:
        environment["PYTHONPATH"] = MOUNT
    if environment:
        container["env"] = variables(environment)
    listed = list(files)
    spec = pod(
        container,
        devices=shape.devices_per_node,
        resource=vendor_traits(verified, shape.group).resource,
        files=f"{app}-files" if listed else None,
        items=_items(listed, () if placement is None else worker.placement_package),
    ) | placed_on(verified, shape.group.pool)
    component: Object = {
        "name": shape.name,
        "type": _TYPE[shape.group.role],
        "replicas": shape.group.count,
        # The pod has its own /dev/shm; the operator's would be mounted at the same path.
        "sharedMemorySize": "0",
    }
    if shape.nodes > 1:
        component["multinode"] = {"nodeCount": shape.nodes}
    return component | {"podTemplate": {"spec": spec}}


def _image(verified: VerifiedServing) -> str:
    return f"nvcr.io/nvidia/ai-dynamo/{_worker(verified).image}-runtime:{RELEASE}"


def _worker(verified: VerifiedServing) -> DynamoWorker:
    engine = verified.plan.goal.engine.name
    worker: DynamoWorker | None = getattr(engine_file(engine, "write"), "DYNAMO", None)
    if worker is None:
        raise UnknownTargetError(f"emit: dynamo has no {engine}; emit kubernetes or slurm")
    return worker


def _role(worker: DynamoWorker, shape: GroupShape) -> tuple[str, ...]:
    options: tuple[str, ...] = ()
    if worker.options_name is not None:
        options = ("--extra-engine-args", f"{MOUNT}/{worker.options_name(shape)}")
    if worker.names_role and shape.group.role is not Role.AGGREGATED:
        options += ("--disaggregation-mode", shape.group.role.value)
    return options


def _cache_events(verified: VerifiedServing, shape: GroupShape) -> tuple[str, ...]:
    """Return the options with which prefill publishes its cache contents to the frontend."""
    if not _routes_by_cache(verified) or shape.group.role is Role.DECODE:
        return ()
    return _worker(verified).event_options


def _router_mode(verified: VerifiedServing) -> str:
    """Return the frontend's policy, one for both roles.

    Raises:
        UnknownTargetError: it lacks the plan's policy.
    """
    router = verified.decision.router
    if router is None:
        # One instance of each role, or a plan without a router (older versions).
        policy = (
            RouterPolicy.LEAST_REQUESTS if are_heterogeneous(verified) else RouterPolicy.ROUND_ROBIN
        )
        if verified.plan.goal.traffic.prefix_hit > 0.0:
            policy = RouterPolicy.CACHE_AWARE
    else:
        # A role with one instance needs no policy.
        by_role = (router.policy, router.decode_policy or router.policy)
        policy = next(
            (candidate for candidate in by_role if candidate is not RouterPolicy.ROUND_ROBIN),
            by_role[0],
        )
    names = DYNAMO_FRONTEND.policies(is_disaggregated=is_disaggregated(verified))
    if policy not in names:
        raise UnknownTargetError(
            f"emit: dynamo {RELEASE} routes by none of {policy.value}, only by"
            f" {', '.join(known.value for known in names)}; plan with 'emit: [dynamo]' alone"
        )
    return names[policy]


def _routes_by_cache(verified: VerifiedServing) -> bool:
    return _router_mode(verified) == DYNAMO_FRONTEND.aggregated[RouterPolicy.CACHE_AWARE]


def _arguments(command: ServerCommand) -> list[str]:
    """Return the command's options as words, without those that Dynamo sets itself."""
    known = (
        " ".join(word for word in command.words if "--" in word)
        .replace('"$PORT"', str(FIRST_PORT))
        .replace('"$MODEL"', "model")
        .replace('"$DRAFT_MODEL"', "'$(DRAFT_MODEL)'")
        .replace(BOOTSTRAP, str(FIRST_PORT + BOOTSTRAP_OFFSET))
        .replace("$FILES", MOUNT)
    )
    words = shlex.split(known)
    kept: list[str] = []
    for option, values in _options(words):
        if option not in _OURS:
            kept += [option, *map(_symmetric, values)]
    unknown = next((word for word in kept if "$" in word and word != "$(DRAFT_MODEL)"), None)
    if unknown is not None:
        raise ValueError(f"{unknown!r} has a shell variable")
    return kept


def _options(words: list[str]) -> list[tuple[str, list[str]]]:
    options: list[tuple[str, list[str]]] = []
    for word in words:
        if re.fullmatch(r"--[a-z0-9-]+", word):
            options.append((word, []))
        elif options:
            options[-1][1].append(word)
    return options


def _symmetric(word: str) -> str:
    """Return a connector's configuration with role `kv_both`, which Dynamo expects."""
    if '"kv_role"' not in word:
        return word
    return json.dumps(json.loads(word) | {"kv_role": "kv_both"})


def _items(files: list[EmittedFile], package: tuple[EmittedFile, ...]) -> list[Object]:
    """Return the path of each file under the mount; a package's files are in its folder."""
    if not package:
        return []
    folder = "moetune_placement-1.dist-info/"
    entry = {file.path.name for file in package}
    return [
        {
            "key": str(file.path),
            "path": (folder if file.path.name in entry else "") + str(file.path),
        }
        for file in files
    ]
