"""Instances for tests and benchmarks: tiny random ones, and the shape of a very large model.

Letters: R runs, O options, S stages, D devices.
"""

from typing import Any

import numpy as np

from solvers.layout.problem import LayoutProblem


def tiny_problem(rng: np.random.Generator) -> LayoutProblem:
    """A random instance small enough to try everything, sometimes without a solution.

    Small integers on purpose: ties between options and limits met exactly are frequent.
    """
    runs, options = int(rng.integers(1, 3)), int(rng.integers(1, 4))
    run_lengths = tuple(int(n) for n in rng.integers(1, 4, size=runs))
    devices, per_device = (int(rng.integers(1, 5)), 1) if rng.random() < 0.6 else (2, 2)
    stages, layers = devices * per_device, sum(run_lengths)
    time_s_RO = 1e-3 * np.sort(rng.integers(1, 9, size=(runs, options)), axis=1).astype(np.float64)
    saved_RO = -np.sort(-rng.integers(0, 9, size=(runs, options)), axis=1)
    fixed = rng.multinomial(layers, [1 / stages] * stages) if rng.random() < 0.3 else None
    need_one = fixed is None and stages <= layers and rng.random() < 0.5
    return LayoutProblem(
        run_lengths=run_lengths,
        device_of_stage=tuple(stage % devices for stage in range(stages)),
        options=tuple(f"option {option}" for option in range(options)),
        time_s_RO=time_s_RO,
        fixed_time_s_S=1e-3 * rng.integers(0, 4, size=stages).astype(np.float64),
        static_bytes_R=rng.integers(0, 9, size=runs),
        fixed_bytes_S=rng.integers(0, 5, size=stages),
        saved_bytes_RO=saved_RO,
        fixed_saved_bytes_S=rng.integers(0, 3, size=stages),
        transient_bytes_RO=rng.integers(0, 6, size=(runs, options)),
        in_flight_S=tuple(int(n) for n in rng.integers(1, 4, size=stages)),
        memory_limit_bytes_D=rng.integers(20, 90, size=devices) // (1 + (devices > 2)),
        num_microbatches=int(rng.integers(1, 7)),
        uniform_option=bool(rng.random() < 0.4),
        fixed_layout=None if fixed is None else tuple(int(n) for n in fixed),
        min_layers_per_stage=int(need_one),
    )


def large_problem(**changes: Any) -> LayoutProblem:
    """3 light then 58 heavy layers on 16 stages of 80 GB, 128 micro-batches, 9 options.

    The counts are those of DeepSeek-V3 (arXiv:2412.19437, sections 2 and 3.2) on 16 pipeline ranks;
    times and bytes are round numbers of a plausible size, not measurements.
    """
    chunks = (1, 2, 4, 8)
    slowdown_O = np.array([1.0, 1.12, 1.13, 1.15, 1.19, 1.30, 1.31, 1.34, 1.38])
    kept_O = np.array([1.0, *[0.45] * 4, *[0.06] * 4])
    transient_O = np.array([0.0, 0.6, 0.3, 0.15, 0.075, 1.0, 0.7, 0.55, 0.48])
    stages = 16
    first, last = np.arange(stages) == 0, np.arange(stages) == stages - 1
    given: dict[str, Any] = {
        "run_lengths": (3, 58),
        "device_of_stage": tuple(range(stages)),
        "options": (
            "none",
            *(f"selective/c{c}" for c in chunks),
            *(f"full/c{c}" for c in chunks),
        ),
        "time_s_RO": np.outer([0.010, 0.016], slowdown_O),
        "fixed_time_s_S": 0.0004 + 0.001 * first + 0.006 * last,
        "static_bytes_R": np.array([3_000_000_000, 9_500_000_000]),
        "fixed_bytes_S": 4_000_000_000 * first + 4_500_000_000 * last,
        "saved_bytes_RO": np.outer([0.6e9, 1.6e9], kept_O),
        "fixed_saved_bytes_S": np.full(stages, 30_000_000),
        "transient_bytes_RO": np.outer([0.6e9, 1.6e9], transient_O),
        "in_flight_S": tuple(range(stages, 0, -1)),
        "memory_limit_bytes_D": np.full(stages, 80_000_000_000),
        "num_microbatches": 128,
    }
    return LayoutProblem(**(given | changes))


def interleaved_problem() -> LayoutProblem:
    """The large model with two stages per device: nobody proves an optimum of it in a second."""
    devices = 16
    once = large_problem()
    return large_problem(
        device_of_stage=tuple(range(devices)) * 2,
        fixed_time_s_S=np.tile(once.fixed_time_s_S, 2) / 2,
        fixed_bytes_S=np.tile(once.fixed_bytes_S, 2) // 2,
        fixed_saved_bytes_S=np.tile(once.fixed_saved_bytes_S, 2),
        in_flight_S=tuple(range(2 * devices, 0, -1)),
    )


def two_stages(**changes: Any) -> LayoutProblem:
    """Return 2 + 2 layers on two devices, a fast and a lean option; any field can be replaced."""
    given: dict[str, Any] = {
        "run_lengths": (2, 2),
        "device_of_stage": (0, 1),
        "options": ("fast", "lean"),
        "time_s_RO": [[1.0, 2.0], [3.0, 5.0]],
        "fixed_time_s_S": [0.5, 0.25],
        "static_bytes_R": [10, 20],
        "fixed_bytes_S": [5, 7],
        "saved_bytes_RO": [[8, 1], [16, 2]],
        "fixed_saved_bytes_S": [3, 0],
        "transient_bytes_RO": [[0, 4], [0, 9]],
        "in_flight_S": (2, 1),
        "memory_limit_bytes_D": [100, 100],
        "num_microbatches": 3,
    }
    return LayoutProblem(**(given | changes))
