"""Seconds of a GEMM [m, k] x [k, n] alone on a device, from its datasheet.

Training, placement and serving ask the same function:

    2.1 us + (c^4 + b^4)^(1/4)
    c    waves * units * 2 tile (k / p + k0) / (r peak * derate(tile)), over the best of tiles and
         of p = 1 to 16 parts of k
    b    bytes at 0.77 of the bandwidth; rows and results are bf16
    waves = mean of max(tiles p / units, 1) and its ceiling

A GEMM is cut into tiles, and tiles run in waves over the device's compute units. The mean lies
between a persistent kernel that splits the last wave and one that does not; k0 is the time of a
tile's prologue and epilogue in elements of k at bf16, so it is more elements of a faster type. k is
cut into parts where tiles are fewer than units. The form is that of NVIDIA's "Matrix Multiplication
Background User's Guide" (tile and wave quantisation); derates and the mean are ours. The tiles of
several groups run in the same waves.

r stands for the largest tile at full waves, on devices of which GEMMs of a model sustain about 0.7;
one that states another share (`reached_ratio`) has as much more or less. AMD counts as Hopper.

Source:  GEMMs of aiconfigurator-core 0.12.0, 13 devices of NVIDIA, three engines, without tables
         whose timing holds more than the kernel (`EngineTraits.spoilt_gemms`): `python
         tests/benchmarks/kernel_prices.py TABLES` prints the errors. Other vendors' were not
         measured; Ascend's and processors' shares are guesses.

What a stack adds is its own: kernels that quantise or unpack (serve/machine.py), and the
share of this rate that a training step sustains (train/constants.py). Not covered: 2-SM tiles,
alignment.

Letters: P numbers of parts, T tiles, C columns.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np

from tuner.config.columns import Numbers
from tuner.config.shapes import Hardware
from tuner.devices.datasheet import Datasheet, Generation

SUSTAINED_RATIO: Final = 0.7
"""Share of the peak that GEMMs of a model sustain on devices that state none (`reached_ratio`), as
on H100 and H200."""

START_S: Final = 2.1e-6
EXTRA_DEPTH: Final = 155.0
BYTES_RATIO: Final = 0.77

# Rows, columns, and what the tile reaches of the largest one's rate.
_TILES: Final = np.array(
    [
        (256.0, 128.0, 1.0),
        (128.0, 128.0, 0.93),
        (128.0, 64.0, 0.80),
        (64.0, 64.0, 0.62),
        (32.0, 128.0, 0.55),
        (16.0, 128.0, 0.40),
    ]
)
TILE_ROWS, TILE_COLUMNS = _TILES[:, :1], _TILES[:, 1:2]
TILE_SIZES = TILE_ROWS * TILE_COLUMNS
TILE_LOSSES = TILE_SIZES * (1.0 / _TILES[:, 2:] - 1.0)
"""Part of a tile's time in which no matrix unit works, in elements: it takes as long where they are
fewer (`reached_share`)."""
PARTS: Final = np.array([1.0, 2.0, 4.0, 8.0, 16.0])[:, None, None]

RATIOS: Final[Mapping[Generation, Mapping[str, float]]] = {
    Generation.AMPERE: {"bf16": 0.88},
    Generation.ADA: {"bf16": 0.70, "fp8": 0.50, "fp8_block": 0.34},
    Generation.HOPPER: {"bf16": 0.93, "fp8": 0.62, "fp8_block": 0.62},
    Generation.BLACKWELL: {"bf16": 0.83, "fp8": 0.54, "fp8_block": 0.75, "nvfp4": 0.45},
    Generation.ASCEND: {"bf16": 0.7},
    Generation.BLACKWELL_RTX: {"bf16": 0.92, "fp8": 0.76, "fp8_block": 0.47, "nvfp4": 0.68},
    Generation.PROCESSOR: {"bf16": 0.9},
}
"""Share of the peak by number format; what is left out counts as bf16."""


def reached_flop_per_s(sheet: Datasheet, units: str, ratio: float) -> float:
    """Return the operations a second of a kernel, by the share of the peak that it reaches.

    Args:
        sheet: the device.
        units: the format that it multiplies, a key of `flop_per_s`.
        ratio: the share, on devices with all matrix units of their generation that sustain 0.7.
    """
    share = reached_share(stated_share(sheet, units, ratio), sheet.matrix_ratio)
    return float(share) * sheet.flop_per_s[units]


def stated_share(sheet: Datasheet, units: str, ratio: float) -> float:
    """Return the share of a kernel on a device whose GEMMs may be stated to sustain another one."""
    return min(ratio * sheet.reached_ratio.get(units, SUSTAINED_RATIO) / SUSTAINED_RATIO, 1.0)


def reached_share(ratio: Numbers, matrix_ratio: Numbers) -> Numbers:
    """Return the share of its peak that a device with so many fewer matrix units reaches.

    What a kernel does beside its matmuls takes as long as there, so it is less of the whole.
    """
    return ratio / (ratio + (1.0 - ratio) * matrix_ratio)


def gemm_share(sheet: Datasheet, *, units: str, dtype: str) -> float:
    """Return the share of a device's peak that its largest GEMMs reach.

    Args:
        sheet: the device.
        units: the format that it multiplies, a key of `flop_per_s`.
        dtype: the format of the weights.
    """
    ratios = RATIOS.get(sheet.generation, RATIOS[Generation.HOPPER])
    ratio = ratios.get("bf16" if units == "bf16" else dtype, ratios["bf16"])
    return stated_share(sheet, units, ratio)


def rated_gemm_s(
    device: Datasheet | Hardware,
    m: Numbers,
    n: Numbers,
    k: Numbers,
    groups: Numbers = 1.0,
    *,
    flop_per_s: Numbers,
    speedup: Numbers,
    weight_bytes: Numbers | None = None,
    depth_factor: Numbers = 1.0,
    unpack_s: Numbers = 0.0,
) -> Numbers:
    """Price a GEMM, or several of one size as one kernel.

    Args:
        device: units and bandwidth.
        m: rows.
        n: columns of the result.
        k: depth.
        groups: GEMMs of these sizes that run together.
        flop_per_s: rate of the largest tile at full waves.
        speedup: peak of the format over that of bf16.
        weight_bytes: of an element of [k, n]; None: bf16's by the speed-up.
        depth_factor: prologue and epilogue of a tile over those that were measured.
        unpack_s: added to the time of the bytes.
    """
    units, matrix_ratio = device.compute_units, device.matrix_ratio
    tiles_TC = (groups / units) * np.ceil(m / TILE_ROWS) * np.ceil(n / TILE_COLUMNS)
    full_PTC = np.maximum(PARTS * tiles_TC, 1.0)
    depth_PC = k / PARTS + EXTRA_DEPTH * depth_factor * matrix_ratio * speedup
    waves_PTC = np.ceil(full_PTC)
    waves_PTC += full_PTC
    least_TC = (waves_PTC * depth_PC).min(axis=0)
    compute_s = (least_TC * (TILE_SIZES + TILE_LOSSES * matrix_ratio)).min(axis=0) * (
        units / flop_per_s
    )
    element_bytes = 2.0 / speedup if weight_bytes is None else weight_bytes
    moved_bytes = groups * (element_bytes * n * k + 2.0 * m * (n + k))
    memory_s = unpack_s + moved_bytes / (BYTES_RATIO * device.memory_bytes_per_s)
    seconds = START_S + ((compute_s**2) ** 2 + (memory_s**2) ** 2) ** 0.25
    return float(seconds[0]) if np.ndim(memory_s) == np.ndim(flop_per_s) == 0 else seconds
