"""Parts that the Kubernetes targets share: the pod of a server, its files, and names.

Kubernetes replaces `$(NAME)` in a container's command where NAME is one of its variables; no
emitted command substitution has that form, and `$` in text from users is doubled (`literal`).
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import yaml

from tuner.engines.files import EmittedFile, comment
from tuner.engines.serving.shape import (
    dns_label,
    group_shapes,
    is_disaggregated,
    needs_draft_model,
    one_machine,
    pool_labels,
)
from tuner.engines.serving.statement import statement
from tuner.plans.serve import VerifiedServing

MOUNT: Final = "/moetune"
"""Folder of the files that a server reads (FILES)."""
POOL_LABEL: Final = "moetune/pool"
"""Label of machines; its value is the pool's name as a DNS label."""

Object = dict[str, Any]


def app_name(verified: VerifiedServing) -> str:
    """Return what the deployment is called in its namespace."""
    suffix = "".join(
        f"-{dns_label(island.name, longest=16)}" for island in verified.decision.islands
    )
    return f"moetune-{dns_label(verified.plan.model.name, longest=16)}{suffix}"


def literal(text: str) -> str:
    """Return text with `$` escaped for Kubernetes."""
    return text.replace("$", "$$")


def weights(verified: VerifiedServing) -> dict[str, str | Object]:
    """Return the variables that name weights; DRAFT_MODEL is empty for the user to fill in."""
    weight_variables: dict[str, str | Object] = {"MODEL": literal(verified.plan.model.name)}
    return weight_variables | ({"DRAFT_MODEL": ""} if needs_draft_model(verified) else {})


def placed_on(verified: VerifiedServing, pool: str) -> Object:
    """Return the node selector of a pod, where the plan has several pools."""
    labels = pool_labels(verified)
    return {"nodeSelector": {POOL_LABEL: labels[pool]}} if _is_labelled(verified) else {}


def _is_labelled(verified: VerifiedServing) -> bool:
    """Return whether pods must be bound to the machines of their pool."""
    return len(pool_labels(verified)) > 1 or verified.is_part


def pod_notes(verified: VerifiedServing) -> tuple[str, ...]:
    """Return the requirements on the cluster, as notes for the user."""
    named = "MODEL and DRAFT_MODEL" if needs_draft_model(verified) else "MODEL"
    notes = [
        f"Put the path or name of the weights into {named}, and a volume or token that reaches them"
        " into the pods."
    ]
    labels = pool_labels(verified)
    if _is_labelled(verified):
        choices = ", ".join(f"{label} for {pool}" for pool, label in labels.items())
        notes.append(
            f"Label the machines with their pool: kubectl label node NODE {POOL_LABEL}=POOL,"
            f" where POOL is {choices}."
        )
    if (is_disaggregated(verified) and one_machine(verified) is None) or any(
        shape.nodes > 1 for shape in group_shapes(verified)
    ):
        notes.append(
            "KV transfers and all-to-all between machines need the NICs: add the cluster's RDMA"
            " resource and the capability IPC_LOCK to the engines' containers."
        )
    return tuple(notes)


def variables(values: Mapping[str, str | Object]) -> list[Object]:
    """Return environment entries; a mapping is a `valueFrom`."""
    return [
        {"name": name, "value": value}
        if isinstance(value, str)
        else {"name": name, "valueFrom": value}
        for name, value in values.items()
    ]


def field(path: str) -> Object:
    """Return the value of a field of the pod itself."""
    return {"fieldRef": {"fieldPath": path}}


def pod(
    container: Object,
    *,
    devices: int,
    resource: str,
    files: str | None = None,
    items: Iterable[Object] = (),
) -> Object:
    """Return a pod of one container that takes devices, with room in /dev/shm."""
    volumes: list[Object] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    mounts: list[Object] = [{"name": "shm", "mountPath": "/dev/shm"}]
    if files is not None:
        listed = list(items)
        volumes.append(
            {"name": "files", "configMap": {"name": files} | ({"items": listed} if listed else {})}
        )
        mounts.append({"name": "files", "mountPath": MOUNT})
    return {
        "containers": [
            container | {"resources": {"limits": {resource: str(devices)}}, "volumeMounts": mounts}
        ],
        "volumes": volumes,
    }


def config_map(name: str, *, files: Iterable[EmittedFile]) -> Object:
    """Return the files as one object."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name},
        "data": {str(file.path): file.text for file in files},
    }


def yaml_text(verified: VerifiedServing, *, notes: Iterable[str], objects: Iterable[Object]) -> str:
    """Return the objects as one file that kubectl applies."""
    return comment((*statement(verified), "", *notes)) + yaml.dump_all(
        list(objects), Dumper=_Dumper, sort_keys=False, explicit_start=True, width=100
    )


class _Dumper(yaml.SafeDumper):
    """Writes no anchors or aliases, and multi-line text as literal blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
