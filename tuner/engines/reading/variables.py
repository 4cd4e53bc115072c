"""Environment variables of a launch that its price depends on, and their defaults in YAML."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

QUEUES: Final = "CUDA_DEVICE_MAX_CONNECTIONS"
GRAPH_REGISTER: Final = "NCCL_GRAPH_REGISTER"
ALLOCATOR: Final = "PYTORCH_CUDA_ALLOC_CONF"
_READ: Final = (QUEUES, GRAPH_REGISTER, ALLOCATOR)
_LONGEST_VALUE: Final = 200


def read_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Keep the variables that the checks here depend on."""
    return {
        name: environment[name]
        for name in _READ
        if name in environment and len(environment[name]) <= _LONGEST_VALUE
    }


_DEFAULT: Final = re.compile(
    r"\$\{(?:(?:oc\.)?env[:,])?\s*([A-Za-z_]\w{0,200})\s*(?::-|:=|[:,-])([^${}]{0,500})\}"
)
"""A variable with a default, as OmegaConf, Primus and shells write it: `${oc.env:NAME,1}`,
`${NAME:1}`, `${NAME:-1}`; a default may be one itself."""
_WRAPPED: Final = re.compile(r"\$\{oc\.decode:([^${}]{0,500})\}")
_DEEPEST: Final = 8


def with_defaults(
    text: str, defaults: dict[str, str], environment: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Return a text of YAML with its variables; `defaults` collects those that are not set."""

    def default(match: re.Match[str]) -> str:
        if match[1] in environment:
            return environment[match[1]]
        defaults[match[1]] = match[2].strip().strip("\"'")
        return defaults[match[1]]

    for _ in range(_DEEPEST):
        replaced = _WRAPPED.sub(r"\1", _DEFAULT.sub(default, text))
        if replaced == text:
            break
        text = replaced
    return text


def defaults_note(defaults: Mapping[str, str]) -> tuple[str, ...]:
    """Return a note on variables whose defaults count; none where there are no such variables."""
    shown = ", ".join(f"{name}={value}" for name, value in list(defaults.items())[:20])
    return (f"not set in the file, so their defaults count: {shown}",) if defaults else ()
