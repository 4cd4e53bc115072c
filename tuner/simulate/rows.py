"""Steps of packed rows, which cost unequal seconds: attention of long documents is quadratic.

Batches of rows are drawn as engines draw them. A micro-batch takes as long as the mean row, times
the mean cost of its rows. Ranks that share experts wait for each other in every MoE layer, hence in
every micro-batch; all ranks wait once a step, for the gradients:

    step = max over expert groups of the pipeline whose micro-batch m takes max_r cost[r, m]

Without experts over data ranks a group is one rank. Sorted rows are those of the same step, the
most expensive together in one micro-batch, and small micro-batches at both ends of the pipeline
(the order of verl).

Letters: B batches, R rows, D data ranks, M micro-batches, G groups. Not covered: experts that are
loaded by the tokens of other ranks' documents; costs that grow more on some stages than on others.
"""

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tuner.arrays import Floats
from tuner.simulate.pipeline import BACKWARD, FORWARD, Pipeline, passes

BATCHES: Final = 32
"""Steps that are drawn."""
GROUPS: Final = 4
"""Expert groups with the most work, one of which ends last."""
MOST_ROWS: Final = 100_000
"""Rows of a step that are drawn without a pipeline."""
PASSES: Final = 1_000
"""Passes of a pipeline that are simulated, for all steps at a time."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowCosts:
    """Costs of the rows that steps are drawn from, and the ranks that wait for each other."""

    cost_R: Floats
    """Seconds of each row over those of the mean row."""
    data: int
    micro_batch: int
    spanned: int = 1
    """Neighbouring data ranks that an expert group spans."""

    def __post_init__(self) -> None:
        if self.data % self.spanned:
            raise ValueError(f"groups of {self.spanned} do not divide {self.data} data ranks")
        self.cost_R.setflags(write=False)

    def drawn_B(self, *, batches: int, microbatches: int, seed: int = 0) -> list[Floats]:
        """Draw the costs of the rows of steps, each row of the pool equally often."""
        rng, rows = np.random.default_rng(seed), self.data * self.micro_batch * microbatches
        shuffled = -(-batches * rows // len(self.cost_R))
        pool = np.concatenate([rng.permutation(self.cost_R) for _ in range(shuffled)])
        return np.split(pool[: batches * rows], batches)

    def in_microbatches(self, cost_R: Floats) -> Floats:
        """Return the cost of each micro-batch of each data rank, [D, M]."""
        cost_MD: Floats = cost_R.reshape(-1, self.data, self.micro_batch).mean(axis=2)
        return cost_MD.T

    def in_lockstep(self, cost_DM: Floats) -> Floats:
        """Return the cost of each micro-batch of each expert group, [G, M]: the largest."""
        slowest_GM: Floats = cost_DM.reshape(-1, self.spanned, cost_DM.shape[1]).max(axis=1)
        return slowest_GM


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSteps:
    """Seconds of steps of drawn rows beyond those of as many mean rows."""

    lost_s_B: tuple[float, ...]
    """Seconds of each step."""
    waiting_s: float
    """Mean seconds that ranks wait for the most expensive micro-batches of others."""

    @property
    def lost_s(self) -> float:
        """Mean seconds of a step."""
        return float(np.mean(self.lost_s_B))

    @property
    def order_s(self) -> float:
        """Mean seconds that the order of micro-batches adds to the pipeline."""
        return self.lost_s - self.waiting_s


def simulate_rows(rows: RowCosts, pipeline: Pipeline, *, are_sorted: bool = False) -> RowSteps:
    """Simulate steps of drawn rows; the pipeline's passes are those of the mean row.

    Of a long step as many micro-batches are simulated as take some 5 ms, and stand for all.
    """
    devices, m = pipeline.num_devices, pipeline.num_microbatches
    if devices == 1:
        m = min(m, max(1, MOST_ROWS // (rows.data * rows.micro_batch)))
    else:
        turns = PASSES // (2 * len(pipeline.forward_s_S) * devices)
        m = min(m, max(2, turns) * devices)
    short, ratio = replace(pipeline, num_microbatches=m), pipeline.num_microbatches / m
    groups, most_work = list[Floats](), list[float]()
    for cost_R in rows.drawn_B(batches=BATCHES, microbatches=m):
        if are_sorted:
            # Dealt from the first rank and from the last in turn, so that none gets all large ones.
            cost_RD = np.sort(cost_R)[::-1].reshape(-1, rows.data)
            cost_RD[1::2] = cost_RD[1::2, ::-1]
            cost_R = cost_RD.reshape(m, -1, rows.data).swapaxes(1, 2)
        cost_GM = rows.in_lockstep(rows.in_microbatches(cost_R))
        cost_GM = cost_GM[np.argsort(-cost_GM.sum(axis=1), kind="stable")[:GROUPS]]
        most_work.append(float(cost_GM[0].mean()))
        groups.append(
            np.hstack((cost_GM[:, ::2][:, ::-1], cost_GM[:, 1::2])) if are_sorted else cost_GM
        )
    mean_s, *others_s = _steps_s(short, np.vstack((np.ones((1, m)), *groups)).T)
    step_s_BG = np.reshape(others_s, (BATCHES, -1))
    return RowSteps(
        lost_s_B=tuple((ratio * (step_s_BG.max(axis=1) - mean_s)).tolist()),
        waiting_s=float(ratio * mean_s * (np.mean(most_work) - 1.0)),
    )


def _steps_s(pipeline: Pipeline, cost_MB: Floats) -> Floats:
    """Simulate the steps of batches at a time, whose micro-batches have these costs.

    The schedule is fixed, so that passes are worked off in the order in which equal ones end.
    """
    seconds = (pipeline.forward_s_S, pipeline.backward_s_S)
    if pipeline.num_devices == 1:
        work_s_B: Floats = cost_MB.sum(axis=0) * sum(map(sum, seconds))
        return work_s_B
    last, send_s = len(pipeline.forward_s_S) - 1, pipeline.send_s
    end_s_B = dict[tuple[int, int, int], Floats]()
    free_s_B = [np.zeros(cost_MB.shape[1])] * pipeline.num_devices
    for timed in sorted(passes(pipeline), key=lambda timed: (timed.end_s, timed.kind)):
        kind, stage, j = timed.kind, timed.stage, timed.microbatch
        start_s_B = free_s_B[timed.device]
        if kind == BACKWARD and stage == last:
            start_s_B = np.maximum(start_s_B, end_s_B[FORWARD, stage, j])
        elif kind == BACKWARD or stage:
            neighbour = stage + 1 if kind == BACKWARD else stage - 1
            start_s_B = np.maximum(start_s_B, end_s_B[kind, neighbour, j] + send_s)
        end_s_B[kind, stage, j] = start_s_B + seconds[kind][stage] * cost_MB[j]
        free_s_B[timed.device] = end_s_B[kind, stage, j]
    step_s_B: Floats = np.max(free_s_B, axis=0)
    return step_s_B
