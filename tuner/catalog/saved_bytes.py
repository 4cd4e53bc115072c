"""Bytes of one parameter in checkpoints, and bytes that a restart reads beside them.

    adapters only    the frozen weights come from where the first start took them
    all weights      frozen ones too, in every checkpoint

Counts of parameters are not known here; tuner/faults/resolved.py multiplies.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedBytes:
    """Bytes that one engine keeps of a parameter on shared storage."""

    trained: float
    """Bytes in every checkpoint of a parameter that the optimizer updates."""
    frozen: float = 0.0
    """Bytes in every checkpoint of a frozen parameter beside adapters."""
    reread: float = 0.0
    """Bytes of a frozen parameter that no checkpoint holds: every restart reads it."""


MIXED_PRECISION: Final = SavedBytes(trained=14.0)
"""bf16 weights, an fp32 master and Adam's two fp32 moments, 2 + 4 + 4 + 4; the 13.8 TB that arXiv
2104.04473 states for 1,008 B parameters are 13.7 of each."""
SINGLE_COPY: Final = SavedBytes(trained=12.0)
"""fp32 weights, which are their own master, and the moments."""
