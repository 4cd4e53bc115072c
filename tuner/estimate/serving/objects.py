"""The servers that a YAML file starts, each with its group name.

    Kubernetes objects               every pod in them, `replicas` times: Deployment, Job, Pod, ...
    LeaderWorkerSet                  the leader's: machines of an instance run one command
    DynamoGraphDeployment            every component's (v1beta1) or service's (v1alpha1)
    values of a Helm chart           every pod in them
    Compose                          every service with its entrypoint, command or image
    srt-slurm                        the options of every role, as NVIDIA's recipes for Slurm have

A group is named by the label `group`, as moetune writes it, else by the component, service or
object. Command and arguments are joined as shell text, after the `env` values as exports. Commands
may name files of ConfigMaps. A YAML file of another kind is refused, not taken for a script.

Not covered: templates and patches (Helm, Kustomize), whose values are elsewhere.
"""

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final

import yaml

from tuner.engines.reading.shell_words import script_text
from tuner.errors import SpecError
from tuner.spec.yaml_text import parse_documents

_TOP_KEY: Final = re.compile(r"^[\"']?[A-Za-z_][\w./-]*[\"']?:(?:[ \t]|$)", re.MULTILINE)
_IS_OBJECT: Final = re.compile(r"^(?:apiVersion|kind|services):(?:[ \t]|$)", re.MULTILINE)
_TEMPLATE: Final = re.compile(r"\{\{.*\}\}")
_SCALARS: Final = (str, int, float)
_SHELLS: Final = frozenset({"bash", "sh", "/bin/bash", "/bin/sh", "/usr/bin/bash"})
_POD_NAME: Final = re.compile(r"\$?\$\((\w+)\)")
_STARTED: Final = re.compile(r"^start ([\w-]{1,80}) \d{1,6} ", re.MULTILINE)
"""A line of machine.sh (tuner/engines/launchers/local.py)."""
_CONTAINERS: Final = ("containers", "mainContainer")
_ENVIRONMENTS: Final = ("env", "envs")
_PROGRAMS: Final[Mapping[str, str]] = {
    "sglang_config": "python3 -m dynamo.sglang",
    "trtllm_config": "python3 -m dynamo.trtllm --extra-engine-args options.yaml",
    "vllm_config": "python3 -m dynamo.vllm",
}
"""Programs of srt-slurm's recipes, by the section of `backend` with the options of each role."""


_MOST_CHARACTERS: Final = 100_000
"""Most characters of one option's value."""
_Maps = Mapping[str, Mapping[str, str]]
"""Files of the ConfigMaps, by the map's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerText:
    """A command that may start a server."""

    name: str
    """Name of its group; empty for a plain script."""
    text: str
    """Shell text of the command."""
    replicas: int = 1
    """Equal instances."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files beside it, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Place of a pod in an object."""

    name: str = ""
    replicas: int = 1
    exports: str = ""


def object_commands(text: str, *, source: str) -> tuple[ServerText, ...] | None:
    """Return the commands of a YAML file; None where the text is none.

    Raises:
        SpecError: the text is no YAML, or one without commands.
    """
    if _TOP_KEY.search(text) is None:
        return None
    try:
        documents = [
            document for document in parse_documents(text, source=source) if document is not None
        ]
    except SpecError as error:
        if _IS_OBJECT.search(text) is None:
            return None
        rendered = "; render the template first" if _TEMPLATE.search(text) else ""
        raise SpecError(f"{error}{rendered}") from error
    objects = [document for document in documents if isinstance(document, dict)]
    keys = [key for document in objects for key in document]
    if not keys or len(objects) < len(documents) or any(not _is_key(key) for key in keys):
        return None  # Shell text can be YAML by accident.
    maps = {
        _text(_mapping(document, "metadata"), "name"): {
            str(name): value
            for name, value in _mapping(document, "data").items()
            if isinstance(value, str)
        }
        for document in objects
        if document.get("kind") == "ConfigMap"
    }
    try:
        return tuple(server for whole in objects for server in _servers(whole, maps))
    except (ValueError, TypeError, RecursionError) as error:
        line = str(error).partition("\n")[0]
        raise SpecError(f"{source}: a value of the YAML is no flag's: {line:.120}") from error


def is_objects(text: str) -> bool:
    """Say whether a YAML text is of Kubernetes or Compose, and no server's options."""
    return _IS_OBJECT.search(text) is not None


def _servers(whole: Mapping[str, Any], maps: _Maps) -> Iterator[ServerText]:
    backend, services = _mapping(whole, "backend"), _mapping(whole, "services")
    sections = [name for name in _PROGRAMS if isinstance(backend.get(name), dict)]
    if sections:
        for name in sections:
            yield from _roles(_mapping(backend, name), _PROGRAMS[name], whole)
    elif services and "kind" not in whole:
        for name, service in services.items():
            if isinstance(service, dict):
                yield _service(str(name), service)
    else:
        yield from _pod_servers(whole, _Place(), maps, seen=set())


def _pod_servers(node: Any, place: _Place, maps: _Maps, *, seen: set[int]) -> Iterator[ServerText]:
    """Yield the containers of all pods below a node; what aliases repeat counts once."""
    if id(node) in seen or not isinstance(node, dict | list):
        return
    seen.add(id(node))
    if isinstance(node, list):
        for inner in node:
            yield from _pod_servers(inner, place, maps, seen=seen)
        return
    place = _placed(node, place)
    mounted = [
        _text(_mapping(volume, "configMap"), "name") for volume in _sequence(node, "volumes")
    ]
    mounted = [name for name in mounted if name in maps] or [*maps]
    files = {name: text for config_map in mounted for name, text in maps[config_map].items()}
    for name in _CONTAINERS:
        for container in _sequence(node, name):
            seen.add(id(container))
            yield from _started_together(container, place, files)
            yield ServerText(
                name=place.name,
                text=place.exports + _container(container, files=files, maps=maps),
                replicas=place.replicas,
                files=files,
            )
    leads = "workerTemplate" if "leaderTemplate" in node else ""
    for key, inner in node.items():
        if key not in (leads, "initContainers"):
            below = place
            if key == "services" and isinstance(inner, dict):
                for name, service in inner.items():
                    below = replace(place, name=str(name))
                    yield from _pod_servers(service, below, maps, seen=seen)
            yield from _pod_servers(inner, below, maps, seen=seen)


def _started_together(
    container: Mapping[str, Any], place: _Place, files: Mapping[str, str]
) -> Iterator[ServerText]:
    """Yield the instances of a container that starts all of a machine, by their scripts."""
    exports = place.exports + _exports(_variables(container.get("env")))
    starts = "\n".join(text for name, text in files.items() if name in str(container))
    for name, count in Counter(_STARTED.findall(starts)).items():
        text = exports + files.get(f"{name}.sh", "")
        yield ServerText(name=name, text=text, replicas=count * place.replicas, files=files)


def _placed(node: Mapping[str, Any], place: _Place) -> _Place:
    """Return what a node says of the pods below it: a name, a number, variables."""
    named = _mapping(node, "metadata")
    is_object = "kind" in node
    stated_name = (
        _text(_mapping(named, "labels"), "group") or _text(named, "name")
        if is_object
        else _text(node, "name")
        if "podTemplate" in node
        else ""
    )
    exports = place.exports
    size = node.get("size")
    if ("workerTemplate" in node or "leaderTemplate" in node) and isinstance(size, int):
        # LeaderWorkerSet sets these in every pod (pkg/utils/pod/pod_utils.go, AddLWSVariables).
        injected = {"GROUP_SIZE": size, "WORKER_INDEX": 0, "LEADER_ADDRESS": f"{place.name}-0"}
        exports += "".join(f"export LWS_{name}={value}\n" for name, value in injected.items())
    if not any(name in node for name in (*_CONTAINERS, "image")):
        exports += "".join(_exports(_variables(node.get(name))) for name in _ENVIRONMENTS)
    return _Place(
        name=stated_name or place.name, replicas=_count(node, place.replicas), exports=exports
    )


def _container(container: Mapping[str, Any], *, files: Mapping[str, str], maps: _Maps) -> str:
    """Return the command of a container as shell text; without one it is the image's."""
    started: Any = container.get("command") or container.get("image")
    if container.get("modelCommand") == "vllmServe":  # llm-d-modelservice
        started = ["vllm", "serve"]
    words = [*_words(started), *_words(container.get("args"))]
    variables = _variables(container.get("env"), maps)
    values = _exports(variables)
    if len(words) >= 2 and words[0] in _SHELLS:
        named = next((word for word in words[1:] if not word.startswith("-")), "")
        script = files.get(named.rpartition("/")[2])
        if script is not None:
            return values + script
    # All words at once, since what they grow to is bounded together.
    return values + _as_shell(_pod_variables("\0".join(words), variables).split("\0"))


def _as_shell(words: list[str]) -> str:
    """Return words as shell text; what `bash -c` runs is shell text already."""
    at = next((at for at, word in enumerate(words) if re.fullmatch(r"-\w*c", word)), 0)
    if words[:1] and words[0] in _SHELLS and words[at + 1 :] and at:
        return script_text(words[at + 1 :])
    return shlex.join(words)


def _service(name: str, service: Mapping[str, Any]) -> ServerText:
    """Return the command of a Compose service: its entrypoint or image, then its command."""
    environment = service.get("environment")
    if isinstance(environment, list):
        texts = [entry for entry in environment if isinstance(entry, str)]
        stated = [entry.partition("=") for entry in texts if "=" in entry]
        environment = {key: value for key, _, value in stated}
    pairs = environment.items() if isinstance(environment, dict) else ()
    values = _exports(_variables([{"name": key, "value": value} for key, value in pairs]))
    started = service.get("entrypoint") or service.get("image")
    words = [word for part in (started, service.get("command")) for word in _split(part)]
    text = _as_shell(words).replace("$$", "$")
    count = _count(_mapping(service, "deploy"), _count({"replicas": service.get("scale")}, 1))
    return ServerText(name=name, text=values + text, replicas=count)


def _split(part: Any) -> list[str]:
    """Return the words of a Compose command, whose text is split like a shell's.

    Raises:
        SpecError: a quote is never closed.
    """
    if not isinstance(part, str):
        return _words(part)
    try:
        return shlex.split(part.replace("\\\n", " "))
    except ValueError as error:
        raise SpecError(f"{part!r:.60}: {str(error).lower()}") from error


def _roles(
    options: Mapping[str, Any], program: str, whole: Mapping[str, Any]
) -> Iterator[ServerText]:
    """Yield the servers of a recipe of srt-slurm, whose options are the engine's flags."""
    environment = _mapping(whole, "backend")
    for role, flags in options.items():
        if not isinstance(flags, dict):
            continue
        variables = environment.get(f"{role}_environment")
        pairs = variables.items() if isinstance(variables, dict) else ()
        values = _exports(_variables([{"name": key, "value": value} for key, value in pairs]))
        count = _count({"replicas": _mapping(whole, "resources").get(f"{role}_workers")}, 1)
        if "options.yaml" in program:
            files = {"options.yaml": yaml.safe_dump(flags)}
            yield ServerText(name=str(role), text=values + program, replicas=count, files=files)
            continue
        words = [word for name, value in flags.items() for word in _flag(str(name), value)]
        text = f"{values}{program} {shlex.join(words)}"
        yield ServerText(name=str(role), text=text, replicas=count)


def _flag(name: str, value: Any) -> list[str]:
    if isinstance(value, bool) or value is None:
        return [f"--{name}"] if value else []
    if isinstance(value, list) and all(isinstance(entry, _SCALARS) for entry in value):
        return [f"--{name}", *map(str, value)]
    if isinstance(value, str):
        return [f"--{name}", value]
    if not _is_bounded(value):
        raise ValueError(f"--{name[:60]} holds more than {_MOST_CHARACTERS} characters")
    return [f"--{name}", json.dumps(value, default=str)]


def _is_bounded(value: Any) -> bool:
    """Say whether a value is short written out; YAML aliases can expand a short text to any."""
    waiting, length = [value], 0
    while waiting and length + len(waiting) <= _MOST_CHARACTERS:
        part = waiting.pop()
        length += len(part) if isinstance(part, str) else 1
        if isinstance(part, dict):
            waiting += [*part.keys(), *part.values()]
        elif isinstance(part, list | tuple | set):
            waiting += part
    return not waiting


def _variables(entries: Any, maps: _Maps = MappingProxyType({})) -> dict[str, str]:
    """Return an object's variables; those of secrets and of other files have no value here."""
    variables: dict[str, str] = {}
    left = _MOST_CHARACTERS
    for entry in _as_list(entries):
        if not isinstance(entry, dict) or not _is_name(entry.get("name")):
            continue
        key = _mapping(_mapping(entry, "valueFrom"), "configMapKeyRef")
        value = entry.get("value", maps.get(_text(key, "name"), {}).get(_text(key, "key")))
        if isinstance(value, _SCALARS):
            variables[entry["name"]] = _pod_variables(str(value), variables)
            left -= len(variables[entry["name"]])
            _check_bounded(left)
    return variables


def _exports(variables: Mapping[str, str]) -> str:
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())


def _check_bounded(left: int) -> None:
    if left < 0:
        raise SpecError(
            f"a pod's variables hold more than {_MOST_CHARACTERS} characters, so it is no launch"
        )


def _pod_variables(text: str, variables: Mapping[str, str]) -> str:
    """Fill in a pod's $(NAME), as Kubernetes does first; $$(NAME) is text, a shell's the unknown.

    Raises:
        SpecError: variables that are named again and again fill more than any launch.
    """
    names = _POD_NAME.findall(text)
    _check_bounded(_MOST_CHARACTERS - sum(len(variables.get(name, "")) for name in names))
    return _POD_NAME.sub(
        lambda match: (
            variables.get(match[1], f"${match[1]}") if match[0][1] == "(" else match[0][1:]
        ),
        text,
    )


def _words(part: Any) -> list[str]:
    if isinstance(part, list):
        return [str(word) for word in part if isinstance(word, _SCALARS)]
    return [part] if isinstance(part, str) else []


def _text(whole: Mapping[str, Any], name: str) -> str:
    text = whole.get(name)
    return text if isinstance(text, str) else ""


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and re.fullmatch(r"[A-Za-z_]\w*", name) is not None


def _is_key(key: Any) -> bool:
    return isinstance(key, str) and re.fullmatch(r"[A-Za-z_][\w./-]*", key) is not None


def _count(whole: Mapping[str, Any], default: int) -> int:
    replicas = whole.get("replicas", default)
    return replicas if type(replicas) is int and replicas > 0 else default


def _mapping(whole: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    inner = whole.get(name)
    return inner if isinstance(inner, dict) else {}


def _sequence(whole: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    return [entry for entry in _as_list(whole.get(name)) if isinstance(entry, dict)]


def _as_list(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [value]
    return value if isinstance(value, list) else []
