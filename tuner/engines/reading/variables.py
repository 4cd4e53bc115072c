"""Environment variables of a launch that its price depends on."""

from collections.abc import Mapping
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
