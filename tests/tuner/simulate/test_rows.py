"""Steps of unequal rows against an independent simulation, and the factors of published notes.

Figures in comments are of another program, on one draw from Python 3.11's standard library; those
of ten draws differ by up to 10 %.
"""

import sysconfig
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tuner.arrays import Floats
from tuner.costs.train.packing import RULES
from tuner.simulate.pipeline import Pipeline
from tuner.simulate.rows import RowCosts, simulate_rows

CAPACITY = 32_768


def schedule(device: int, *, devices: int, microbatches: int) -> list[tuple[str, int]]:
    """1F1B: warm-up, one forward and one backward in turn, the rest."""
    warm = min(microbatches, devices - 1 - device)
    order = [("F", j) for j in range(warm)]
    for j in range(microbatches - warm):
        order += [("F", warm + j), ("B", j)]
    return order + [("B", j) for j in range(microbatches - warm, microbatches)]


def step_s(
    cost_DM: Floats, *, devices: int, spanned: int, forward_s: float, send_s: float
) -> float:
    """A step of all ranks by events: each pass waits for its group, in every micro-batch.

    Ranks of a group start and end every pass together, as all-to-alls in each layer make them.
    """
    ends = []
    for first in range(0, len(cost_DM), spanned):
        group = cost_DM[first : first + spanned]
        done: dict[tuple[str, int, int], float] = {}
        clock, lists = (
            [0.0] * devices,
            [schedule(d, devices=devices, microbatches=group.shape[1]) for d in range(devices)],
        )
        while any(lists):
            for device, left in enumerate(lists):
                while left:
                    kind, j = left[0]
                    if kind == "F":
                        needs = [("F", device - 1, j)] if device else []
                    else:
                        needs = [("B", device + 1, j) if device < devices - 1 else ("F", device, j)]
                    if any(need not in done for need in needs):
                        break
                    arrival = max(
                        (done[need] + send_s * (need[1] != device) for need in needs), default=0.0
                    )
                    seconds = forward_s * (1.0 if kind == "F" else 2.0) * group[:, j].max()
                    clock[device] = max(clock[device], arrival) + seconds
                    done[kind, device, j] = clock[device]
                    left.pop(0)
        ends.append(max(clock))
    return max(ends)


def pipeline(devices: int, microbatches: int, *, send_s: float = 0.0) -> Pipeline:
    return Pipeline(
        forward_s_S=(1.0,) * devices,
        backward_s_S=(2.0,) * devices,
        num_devices=devices,
        num_microbatches=microbatches,
        send_s=send_s,
    )


def test_steps_are_those_of_an_independent_simulation() -> None:
    rng = np.random.default_rng(4)
    for devices, data, spanned, microbatches, size in (
        (1, 8, 8, 6, 1), (1, 8, 1, 6, 2), (4, 8, 8, 12, 1), (4, 8, 2, 9, 1), (8, 4, 4, 16, 1)
    ):  # fmt: skip
        rows = RowCosts(
            cost_R=rng.lognormal(0.0, 0.6, 400), data=data, spanned=spanned, micro_batch=size
        )
        schedule_ = pipeline(devices, microbatches, send_s=0.1 * (devices > 1))
        even = np.ones((data, microbatches))
        simulated = partial(
            step_s, devices=devices, spanned=spanned, forward_s=1.0, send_s=schedule_.send_s
        )
        mean_s = simulated(even)
        for are_sorted in (False, True):
            steps = simulate_rows(rows, schedule_, are_sorted=are_sorted)
            expected = []
            for cost_R in rows.drawn_B(batches=32, microbatches=microbatches):
                if are_sorted:
                    hands = np.sort(cost_R)[::-1].reshape(-1, data)
                    hands = np.array([hand[:: (-1) ** j] for j, hand in enumerate(hands)])
                    cost_R = np.concatenate([hand.T for hand in np.split(hands, microbatches)])
                cost_DM = cost_R.reshape(microbatches, data, size).mean(axis=2).T
                if are_sorted:
                    # Small ones at both ends.
                    cost_DM = np.hstack((cost_DM[:, ::2][:, ::-1], cost_DM[:, 1::2]))
                expected.append(simulated(cost_DM))
            steps_s = mean_s + np.array(steps.lost_s_B)
            assert steps_s == pytest.approx(expected, rel=1e-9), (devices, spanned, are_sorted)


def files() -> list[int]:
    """Tokens of the standard library's sources, 3.5 bytes each, like code."""
    root = Path(sysconfig.get_paths()["stdlib"])
    sizes = [
        path.stat().st_size
        for path in sorted(root.rglob("*.py"))
        if "site-packages" not in path.parts
    ]
    return [min(CAPACITY, int(size / 3.5)) for size in sizes if size > 7]


def row_costs(quadratic_at: float, *, data: int, spanned: int = 1) -> RowCosts:
    """Rows of torchtitan's rule, where a token costs 1 + L / X."""
    tokens = np.random.default_rng(0).permutation(files()).tolist()
    rows = RULES["next_fit"].pack(tokens, CAPACITY)
    cost_R = np.array([sum(n * (1.0 + n / quadratic_at) for n in row) for row in rows])
    return RowCosts(cost_R=cost_R / cost_R.mean(), data=data, spanned=spanned, micro_batch=1)


def test_waits_and_orders_are_those_of_the_notes() -> None:
    # Model, ranks of a group: as drawn 2.13 and 1.52, sorted 1.16 and 1.11.
    for quadratic_at, drawn, in_order in ((15_500.0, 2.13, 1.16), (97_000.0, 1.52, 1.11)):
        rows, step = row_costs(quadratic_at, data=32, spanned=32), pipeline(1, 6)
        factors = [1 + simulate_rows(rows, step, are_sorted=s).lost_s / 18 for s in (False, True)]
        assert factors == pytest.approx([drawn, in_order], rel=0.12), quadratic_at
        # Without experts over data ranks these wait once a step.
        once = 1 + simulate_rows(row_costs(quadratic_at, data=32), step).lost_s / 18
        assert once < 0.9 * factors[0]
    # A pipeline of 8 stages and 32 micro-batches: 1.66 as drawn, 1.03 small at both ends.
    for quadratic_at, drawn, in_order in ((15_500.0, 1.66, 1.03), (97_000.0, 1.29, 0.97)):
        rows, step = row_costs(quadratic_at, data=1), pipeline(8, 32)
        mean_s = 3.0 * (32 + 7)
        factors = []
        for are_sorted in (False, True):
            steps = simulate_rows(rows, step, are_sorted=are_sorted)
            factors.append((mean_s + steps.lost_s) / (mean_s + steps.waiting_s))
        assert factors == pytest.approx([drawn, in_order], rel=0.12), quadratic_at


def test_steps_of_a_billion_rows_take_no_longer_than_those_of_a_million() -> None:
    rows = RowCosts(cost_R=np.array([0.5, 1.0, 1.5]), data=8, micro_batch=4)
    pipeline = Pipeline(
        forward_s_S=(1e-3,), backward_s_S=(2e-3,), num_devices=1, num_microbatches=30_000_000
    )
    assert abs(simulate_rows(rows, pipeline).waiting_s) < 1e-2 * 30_000_000 * 3e-3
