"""Required length of a recording to plan from: `python tests/benchmarks/recording_length.py`.

    P passes   L layers   E experts

A recording is cut into blocks of 1, 1/2, 1/4, ... of its passes, and each block into a fit half and
a hold-out half. Printed for each length, as means over its blocks:

    apart        total variation between the two halves' shares of experts, mean over layers
    by lot       the same with a random split of the passes, mean of 20
    independent  the same if every token copy were drawn independently:
                 sum over e of sqrt(p_e (1 - p_e) / (pi n)), n copies of a layer in each half
                 (mean of the absolute difference of two nearly normal shares, halved)
    effect       (by lot / independent)^2: the design effect, token copies per independent one
    floor        imbalance on the hold-out half of an even split, planned for an even split: the
                 largest rank load over the mean, of `--blocks` blocks

Where the difference is sampling noise, `apart` falls as the root of the length and `effect` stays;
where the traffic drifts, `apart` levels off above `by lot`, and `effect` grows with length.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import numpy.typing as npt

from profilers.routing.recording import Recording
from profilers.routing.store import read_recording, write_recording
from solvers.placement.dispatch.case import DispatchCase
from solvers.placement.dispatch.sampling import expected_loads
from tests.benchmarks.placement_dispatch import (
    RANKS_A_NODE,
    WIDE,
    WIDE_DOMAINS,
    Case,
    Size,
    largest,
    planned,
)

Counts = npt.NDArray[np.int64]
FEWEST: Final = 8
"""Passes of a block."""
LOTS: Final = 20
SEED: Final = 11
SHAPES: Final = ((32, 9), (72, 4), (64, 5))


def main() -> int:
    """Print a row for every length."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recordings", nargs="*", help=f"names in examples/routing; {WIDE_DOMAINS}")
    parser.add_argument("--blocks", type=int, default=0, help="blocks a length that are planned")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a plan")
    chosen = parser.parse_args()
    for name in chosen.recordings or WIDE_DOMAINS:
        recording = read_recording(WIDE / name)
        for length in lengths(recording.num_passes):
            result = measured(recording, length)
            text = "  ".join(f"{of} {value:.4f}" for of, value in result.items())
            for ranks, slots in SHAPES if chosen.blocks else ():
                left = floors(
                    recording, length, ranks, slots, blocks=chosen.blocks, seconds=chosen.seconds
                )
                text += f"  floor {ranks} x {slots} {np.mean(left):.4f}"
            sys.stdout.write(f"{name}: {length} passes  {text}\n")
            sys.stdout.flush()
    return 0


def lengths(num_passes: int) -> Iterator[int]:
    """Return the whole, its half, and so on."""
    while num_passes >= FEWEST:
        yield num_passes
        num_passes //= 2


def measured(recording: Recording, length: int) -> dict[str, float]:
    """Return the figures of a length that need no plan."""
    result = [compared(block) for block in blocks_of(recording.count_PLE, length)]
    distance, by_lot, independent = (float(np.mean(values)) for values in zip(*result, strict=True))
    tokens = recording.count_PLE[:length].sum(axis=(0, 2)).mean() / (recording.top_k or 1)
    return {
        "million tokens": tokens / 1e6,
        "apart": distance,
        "by lot": by_lot,
        "independent": independent,
        "effect": (by_lot / independent) ** 2,
    }


def blocks_of(count_PLE: Counts, length: int) -> list[Counts]:
    """Return the passes in blocks of a length that do not overlap."""
    return [count_PLE[at : at + length] for at in range(0, len(count_PLE) - length + 1, length)]


def compared(block_PLE: Counts) -> tuple[float, float, float]:
    """Return the total variation of a block's halves, of random halves, of independent copies."""
    rng = np.random.default_rng(SEED)
    by_lot = [_distance(block_PLE[rng.permutation(len(block_PLE))]) for _ in range(LOTS)]
    half_LE = block_PLE.sum(axis=0) / 2
    p_LE = half_LE / half_LE.sum(axis=1, keepdims=True)
    copies_L1 = half_LE.sum(axis=1, keepdims=True)
    independent_L = np.sqrt(p_LE * (1 - p_LE) / (np.pi * copies_L1)).sum(axis=1)
    return _distance(block_PLE), float(np.mean(by_lot)), float(independent_L.mean())


def _distance(block_PLE: Counts) -> float:
    half = len(block_PLE) // 2
    halves_HLE = np.stack([block_PLE[:half].sum(axis=0), block_PLE[half : 2 * half].sum(axis=0)])
    share_HLE = halves_HLE / halves_HLE.sum(axis=2, keepdims=True)
    return float(np.abs(share_HLE[0] - share_HLE[1]).sum(axis=1).mean() / 2)


def floors(
    recording: Recording, length: int, ranks: int, slots: int, *, blocks: int, seconds: float
) -> list[float]:
    """Return the imbalance of an even split on the hold-out halves of the first blocks."""
    left = []
    for block_PLE in blocks_of(recording.count_PLE, length)[:blocks]:
        with tempfile.TemporaryDirectory() as folder:
            left.append(_floor(recording, block_PLE, (ranks, slots), Path(folder), seconds))
    return left


def _floor(
    recording: Recording, block_PLE: Counts, shape: tuple[int, int], work: Path, seconds: float
) -> float:
    kept: dict[str, Any] = {"source_SLE": None, "transition_MEE": None, "token_LTK": None}
    write_recording(work / "block", replace(recording, count_PLE=block_PLE, **kept))
    case = Case(
        name="block",
        recording=work / "block",
        ranks=shape[0],
        slots=shape[1],
        per_node=RANKS_A_NODE,
    )
    made = planned(case, "even", Size(time_limit_s=seconds), work)
    holdout_PLE = made.evidence.holdout_PLE.mean(axis=0)[None]
    holdout = DispatchCase(load_PLE=holdout_PLE, placement=made.placement, ranks=made.ranks, seed=0)
    return largest(expected_loads("even", holdout))


if __name__ == "__main__":
    sys.exit(main())
