"""Which published measurements speak for a launch target: family, generation and release.

Residuals are stored under the software that was measured (tuner/costs/analytic/calibration.py). A
target that nobody published runs of takes those of its nearest relative: Megatron-LM's layers are
those that NeMo's containers run, the reference step is plain PyTorch under FSDP. On a device that
the relative never ran on, only what holds for the device's generation applies.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from tuner.costs.analytic.calibration import Regime
from tuner.costs.analytic.columns_of import PRECISION_OF
from tuner.costs.analytic.constants import Software
from tuner.devices.datasheet import Datasheet
from tuner.spec.capabilities import programs


class Relative(NamedTuple):
    """Where a target's residuals come from."""

    family: str
    software: Software


OF_TARGET: Final[Mapping[str, Relative]] = {
    "megatron-lm": Relative("nemo", Software.MEGATRON_2025),
    "megatron-lm-0.16": Relative("nemo", Software.MEGATRON_2025),
    "megatron-bridge": Relative("nemo", Software.MEGATRON_2026),
    "megatron-bridge-26.02": Relative("nemo", Software.MEGATRON_2025),
    "megatron-bridge-26.04": Relative("nemo", Software.MEGATRON_2026),
    "torchtitan": Relative("torchtitan", Software.TORCH_FSDP),
    "deepspeed": Relative("llm-foundry", Software.TORCH_FSDP),
    "reference": Relative("torchtitan", Software.TORCH_FSDP),
    "torchrun": Relative("torchtitan", Software.TORCH_FSDP),
}


def regime_of(targets: Sequence[str], sheet: Datasheet, *, precision: str) -> Regime:
    """Return the regime of the first program among the targets."""
    family, software = OF_TARGET[programs(targets)[0]]
    return Regime(
        device=sheet.name,
        generation=sheet.generation,
        precision=PRECISION_OF[precision],
        software=software,
        family=family,
    )
