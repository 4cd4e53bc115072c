"""Distinct experts that the most-loaded device reads, by recorded loads, replicas and placement.

    slots      of each device, as its memory holds; all of them are filled
    replicas   beyond one of each expert, slot by slot to the expert with the most load a copy
    placement  the copies by the placement solver, whose cost is what a copy costs once it is read
    dispatch   every activated expert is read by one of its copies, on the device with the fewest
               so far (solvers/placement/dispatch/activated.py)

For a number of tokens B the experts of a layer are activated independently of each other with
chance 1 - (1 - p)^B, p = min(1, k share); the mean over draws and layers of the largest count of a
device is taken, and read between sizes in logarithms.

Source: Janus (arXiv:2512.13525): replica counts, placement, and its scheduler AEBS. It counts from
drawn tokens of a trace; recordings hold loads of experts, not the choices of each token, so that
experts which go together are not seen to.

Letters: W workloads, L layers, E experts, P draws, G devices, Q query points.
"""

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from solvers.placement.balance.problem import BalanceProblem
from solvers.placement.dispatch.activated import activated_experts
from solvers.placement.dispatch.case import DispatchCase
from solvers.placement.ranks import Placement, Ranks
from solvers.registry import BALANCE
from tuner.costs.serve.curves import Floats
from tuner.costs.serve.decoder import Experts
from tuner.costs.serve.expert_loads import ExpertLoads

SIZES: Final = np.geomspace(1.0, 4096.0, 9)
"""Tokens of a layer at which devices are counted; beyond them nearly all experts are read."""
DRAWS: Final = 4
LAYERS: Final = 4
"""Evenly picked of the recorded ones."""
PLACED_TOKENS: Final = 64.0
"""Tokens of a layer that copies are placed for."""
SEED: Final = 20_253
LIMIT_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplicaCounts:
    """Counts for devices of so many slots; itself an `Activated` of tuner/costs/serve."""

    loads: ExpertLoads
    slots: int
    """Of one device in a layer."""
    known: dict[int, Floats] = field(default_factory=dict)
    """By devices: counts at `SIZES`; filled on use."""

    def __call__(self, experts: Experts, tokens_Q: Floats, devices: int) -> Floats:
        """Return the experts that the most-loaded of so many devices reads."""
        if devices not in self.known:
            self.known[devices] = self._counted(devices)
        log_Q = np.log(np.maximum(tokens_Q, 1.0))
        return np.asarray(np.interp(log_Q, np.log(SIZES), self.known[devices]))

    def placement(self, devices: int) -> Placement:
        """Return the copies of every device, layer by layer."""
        reach_LE = self._reach_LE()
        ranks = self._ranks(devices)
        problem = BalanceProblem(
            load_WLE=(PLACED_TOKENS * reach_LE)[None],
            weight_W=np.ones(1),
            ranks=ranks,
            active_load=PLACED_TOKENS,
        )
        placement = BALANCE.solve(problem, time_limit_s=LIMIT_S, method="lpt").solution
        if placement is None:
            raise ValueError(f"{devices} devices of {self.slots} slots hold no copy of each expert")
        return placement

    def _counted(self, devices: int) -> Floats:
        reach_LE = self._reach_LE()
        rng = np.random.default_rng(SEED)
        chance_PLE = np.repeat(
            [1.0 - (1.0 - reach_LE) ** tokens for tokens in SIZES], DRAWS, axis=0
        )
        case = DispatchCase(
            load_PLE=(rng.random(chance_PLE.shape) < chance_PLE).astype(np.float64),
            placement=self.placement(devices),
            ranks=self._ranks(devices),
        )
        most_loaded_PL = activated_experts(case).max(axis=2)
        return np.asarray(most_loaded_PL.mean(axis=1).reshape(len(SIZES), DRAWS).mean(axis=1))

    def _ranks(self, devices: int) -> Ranks:
        experts = self.loads.share_LE.shape[1]
        return Ranks.uniform(ranks=devices, slots_per_rank=min(self.slots, experts))

    def _reach_LE(self) -> Floats:
        share_LE = self.loads.share_LE
        rows = np.unique(np.linspace(0, len(share_LE) - 1, LAYERS).round().astype(int))
        return np.asarray(np.minimum(self.loads.top_k * share_LE[rows], 1.0))
