"""Prices of serving kernels from datasheets beside measured ones.

    python tests/benchmarks/kernel_prices.py TABLES [--rows 1500] [--system NAME] [--groups]

TABLES is a folder of aiconfigurator's systems. Rows of each engine's newest table are drawn at
random, so many of one operation and number format, and priced from the datasheet. Printed by
generation, operation and format: the median of ln(predicted / measured), and the median and 90 %
quantile of its size. `--groups` prints engines apart. SGLang's table of fp8 GEMMs holds the kernel
that quantises rows, which launches fuse. Exit code 1: a median size of bf16 kernels on Hopper or
Blackwell exceeds its bound.
"""

import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from profilers.arrays import Arrays
from tests.benchmarks.bars import parse, say
from tuner.backtest.serving.launches import SYSTEMS
from tuner.backtest.serving.tables import build_machines
from tuner.engines.serving.releases import ENGINE_TRAITS
from tuner.prices.ops import Op
from tuner.prices.serve.machine import LOAD, ServingMachine
from tuner.prices.serve.work import BYTES

MORE_AXES: Final = {
    "latent_attention": {"head_dim": 192, "value_dim": 128},
    "latent_decode": {"kv_elements": 576},
}
"""Sizes that a table leaves to its models, DeepSeek-V3 and R1."""
OPERATIONS: Final = (
    "gemm",
    "attention",
    "latent_attention",
    "decode_attention",
    "latent_decode",
    "moe",
)
LARGEST_SIZE: Final = {"gemm": 0.15, "attention": 0.3, "decode_attention": 0.25, "moe": 0.3}
BOUND: Final = ("hopper", "blackwell")


def main() -> int:
    """Print the errors of every group."""
    options = parse(__doc__, {"tables": Path, "--rows": 1500, "--system": "", "--groups": False})
    names = [options.system] if options.system else list(SYSTEMS)
    machines, origins = build_machines(names, [options.tables])
    errors: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for name, machine in machines.items():
        if origins[name] == "tables":
            for group, error in _errors(machine, options.rows):
                shown = group if options.groups else group[1:]
                errors[(machine.sheet.generation.value, *shown)].append(error)
    is_above = False
    for group, sample in sorted(errors.items()):
        size_N = np.abs(sample)
        say(
            f"{' '.join(group)}: {len(sample)} rows, median {np.median(sample):+.2f}, size"
            f" {np.median(size_N):.2f}, P90 {np.quantile(size_N, 0.9):.2f}"
        )
        if group[0] in BOUND and group[-1] == "bf16":
            is_above |= bool(np.median(size_N) > LARGEST_SIZE[group[-2]])
    return int(is_above)


def _errors(machine: ServingMachine, rows: int) -> Iterator[tuple[tuple[str, ...], float]]:
    assert machine.tables is not None
    for operation in OPERATIONS:
        newest: dict[str, Arrays] = {}
        for table in machine.tables.read(operation):
            newest[table.software] = table
        for software, table in newest.items():
            spoilt = ENGINE_TRAITS[software].spoilt_gemms if operation == "gemm" else ()
            for op, seconds in _drawn(table, rows):
                if op.dtype in spoilt:
                    continue
                error = float(np.log(machine.rated_s(op).item() / seconds))
                kind = "" if op.operation == "moe" else op.kind
                yield (software, operation, kind or op.dtype), error


def _drawn(table: Arrays, rows: int) -> Iterator[tuple[Op, float]]:
    """Draw rows of every kind and number format that is priced."""
    rng = np.random.default_rng(0)
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for row, pair in enumerate(zip(table.kind_N.tolist(), table.dtype_N.tolist(), strict=True)):
        is_expert = table.operation == "moe"
        is_priced = pair[0] == LOAD if is_expert else "module" not in pair[0]
        if is_priced and (pair[1] in BYTES or not (is_expert or table.operation == "gemm")):
            groups[pair].append(row)
    for (kind, dtype), members in groups.items():
        for row in rng.permutation(members)[:rows]:
            sizes = {axis: int(values_N[row]) for axis, values_N in table.axes_N.items()}
            axes = {**sizes, **MORE_AXES.get(table.operation, {})}
            op = Op(
                operation=table.operation,
                kind=kind,
                dtype=dtype,
                axes=axes,
                software=table.software,
            )
            yield op, float(table.time_s_N[row])


if __name__ == "__main__":
    sys.exit(main())
