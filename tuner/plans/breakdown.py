"""Causes of the seconds of a step, in words.

Files keep short keys (`breakdown_s` of tuner/plans/train.py and tuner/plans/serve.py); people read
what they stand for. Communication counts where it is exposed: what computation hides takes no time.
"""

from collections.abc import Mapping
from typing import Final

CAUSES: Final[Mapping[str, str]] = {
    # A training step.
    "bubble": "pipeline bubble",
    "rows": "waiting for unequal rows",
    "once": "gradient reduction and optimizer",
    "expert": "exposed all-to-all",
    "tensor": "exposed TP communication",
    "context": "exposed CP communication",
    "collectives": "exposed communication",
    "recompute": "recomputation",
    "host": "waiting for the host",
    "sharding": "exposed gathers and reductions of shards",
    "offload": "exposed copies to host memory",
    # One on the reference step, operation by operation.
    "ffn": "FFN and shared experts",
    "ends": "embedding and head",
    "tensor_communication": "TP communication",
    "expert_communication": "all-to-all",
    "pipeline_communication": "pipeline sends",
    "data_communication": "gradient reduction",
    # A decode step.
    "projections": "attention projections",
    "dense": "dense FFN",
    "shared": "shared experts",
    "exchange": "all-to-all",
    "small": "norms and other small kernels",
    "scheduler": "scheduler on the host",
    "clocks": "lower clocks under load",
}
"""Causes whose key alone would not be understood."""


def cause_words(cause: str) -> str:
    """Name a cause for people."""
    return CAUSES.get(cause, cause.replace("_", " "))
