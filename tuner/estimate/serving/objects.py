"""The servers that a file of Kubernetes objects starts, each with its group name.

    Deployment, StatefulSet          the containers of its pods, `replicas` times
    LeaderWorkerSet                  the leader's: machines of an instance run one command
    DynamoGraphDeployment            every component's, `replicas` times

A group is named by the label `group`, as moetune writes it, else by the object's name. Command and
arguments are joined as shell text, after the `env` values as exports. Commands may name files of
ConfigMaps.

Not covered: Helm and Kustomize, whose values are elsewhere; Dynamo's `services` of v1alpha1.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import yaml

from tuner.errors import SpecError

_IS_OBJECT: Final = re.compile(r"^(apiVersion|kind):\s", re.MULTILINE)
_SCALARS: Final = (str, int, float)
_SHELLS: Final = frozenset({"bash", "sh", "/bin/bash", "/bin/sh"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerText:
    """A command that may start a server."""

    name: str
    """Of its group; empty for a plain script."""
    text: str
    """As shell text."""
    replicas: int = 1
    """Equal instances."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files beside it, by name."""


def object_commands(text: str, *, source: str) -> tuple[ServerText, ...] | None:
    """Return the commands of all containers; None where the text holds no objects.

    Raises:
        SpecError: the text is no YAML.
    """
    if len(set(_IS_OBJECT.findall(text))) < 2:
        return None
    try:
        objects = [one for one in yaml.safe_load_all(text) if isinstance(one, dict)]
    except (yaml.YAMLError, RecursionError) as error:
        line = str(error).partition("\n")[0]
        raise SpecError(f"{source}: no YAML of Kubernetes objects: {line:.120}") from error
    files = {
        str(name): value
        for one in objects
        if one.get("kind") == "ConfigMap"
        for name, value in _mapping(one, "data").items()
        if isinstance(value, str)
    }
    return tuple(
        ServerText(name=name, text=_as_shell(container), replicas=replicas, files=files)
        for one in objects
        for name, replicas, pod in _pods(one)
        for container in _sequence(pod, "containers")
    )


def _pods(one: Mapping[str, Any]) -> Iterator[tuple[str, int, Mapping[str, Any]]]:
    """Yield the pods of an object: their group, how many, and their specification."""
    spec, kind = _mapping(one, "spec"), one.get("kind")
    named = _mapping(one, "metadata")
    name = _text(_mapping(named, "labels"), "group") or _text(named, "name")
    if kind in ("Deployment", "StatefulSet"):
        yield name, _count(spec), _mapping(spec, "template", "spec")
    elif kind == "LeaderWorkerSet":
        template = _mapping(spec, "leaderWorkerTemplate")
        leads = "leaderTemplate" if "leaderTemplate" in template else "workerTemplate"
        yield name, _count(spec), _mapping(template, leads, "spec")
    elif kind == "DynamoGraphDeployment":
        for component in _sequence(spec, "components"):
            pod = _mapping(component, "podTemplate", "spec")
            yield _text(component, "name"), _count(component), pod


def _as_shell(container: Mapping[str, Any]) -> str:
    values = "".join(
        f"export {one['name']}={shlex.quote(str(one['value']))}\n"
        for one in _sequence(container, "env")
        if _is_name(one.get("name")) and isinstance(one.get("value"), _SCALARS)
    )
    words = [
        str(word)
        for part in ("command", "args")
        for word in _listed(container.get(part))
        if isinstance(word, _SCALARS)
    ]
    if len(words) >= 3 and words[0] in _SHELLS and words[1] in ("-c", "-lc"):
        return values + words[2]
    # A pod's $(NAME) is a variable, not a command's output.
    return values + shlex.join(re.sub(r"\$\((\w+)\)", r"$\1", word) for word in words)


def _text(whole: Mapping[str, Any], name: str) -> str:
    text = whole.get(name)
    return text if isinstance(text, str) else ""


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and re.fullmatch(r"[A-Za-z_]\w*", name) is not None


def _count(spec: Mapping[str, Any]) -> int:
    replicas = spec.get("replicas", 1)
    return replicas if type(replicas) is int and replicas > 0 else 1


def _mapping(whole: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    inner: Any = whole
    for name in names:
        inner = inner.get(name) if isinstance(inner, dict) else None
    return inner if isinstance(inner, dict) else {}


def _sequence(whole: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    return [one for one in _listed(whole.get(name)) if isinstance(one, dict)]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
