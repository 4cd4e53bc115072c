"""Initial weights that do not depend on the parallel layout.

Each full tensor (each expert's, for experts) comes from a generator seeded by the run's seed and
the parameter's name; a rank keeps its slice.
"""

import hashlib

import torch
from torch import Tensor, nn

from profilers.steps.config import StepConfig

STANDARD_DEVIATION = 0.02


def normal(
    name: str, shape: tuple[int, ...], *, seed: int, device: torch.device, gain: float = 1.0
) -> Tensor:
    """Draw the full tensor of this name, fp32, where it will lie.

    A processor draws 0.2e9 numbers a second: a GPU's share of a model would take it minutes.
    """
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest))
    return torch.randn(shape, generator=generator, device=device).mul_(STANDARD_DEVIATION * gain)


def shard(full: Tensor, *, axis: int, rank: int, ranks: int) -> Tensor:
    """Keep this rank's equal part along an axis."""
    return full.chunk(ranks, dim=axis)[rank]


def compute_type(config: StepConfig) -> torch.dtype:
    """Return the type of activations."""
    types = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
    return types[config.precision]


def trained_type(config: StepConfig) -> torch.dtype:
    """Return the type of what is trained, of its gradients and its optimizer state."""
    return torch.promote_types(compute_type(config), torch.float32)


def kept_type(config: StepConfig) -> torch.dtype:
    """Return the type of the model's weights: as trained, or beside adapters that of compute."""
    return trained_type(config) if config.adapters is None else compute_type(config)


def parameter(values: Tensor, device: torch.device, config: StepConfig) -> nn.Parameter:
    """Put values, which may be a view of something larger, on the device as a parameter.

    It is frozen where adapters are trained.
    """
    kept = values.to(device, dtype=kept_type(config), copy=True).contiguous()
    return nn.Parameter(kept, requires_grad=config.adapters is None)
