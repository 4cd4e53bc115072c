"""Activation-balanced dispatch: one replica of an expert takes all its tokens of a step.

In a memory-bound decode step a rank's time follows the number of distinct experts that it must
read, so splitting an expert's tokens would read it twice. Experts of one replica go to their host;
the others, by id, to the host that has the fewest activated experts so far (ties: the lower rank).

Source:  Janus' runtime scheduler AEBS, arXiv 2512.13525; its order among replicated experts is not
         published, ids are ours.
"""

import numpy as np
import numpy.typing as npt

from solvers.placement.dispatch.case import DispatchCase
from solvers.placement.ranks import Floats, Ints


def schedule(case: DispatchCase) -> tuple[Floats, Ints]:
    """Return token copies and activated experts of each rank, both `[P][L][G]`."""
    shape = (len(case.load_PLE), case.num_layers, case.ranks.num_ranks)
    load_PLG, active_PLG = np.zeros(shape), np.zeros(shape, dtype=np.int64)
    for layer, hosts_EG in enumerate(case.copies_LEG > 0):
        _schedule_layer(case.load_PLE[:, layer], hosts_EG, load_PLG[:, layer], active_PLG[:, layer])
    return load_PLG, active_PLG


def _schedule_layer(
    load_PE: Floats, hosts_EG: npt.NDArray[np.bool_], load_PG: Floats, active_PG: Ints
) -> None:
    fixed_E = hosts_EG.sum(axis=1) == 1
    fixed_EG = hosts_EG[fixed_E]
    load_PG += load_PE[:, fixed_E] @ fixed_EG
    active_PG += (load_PE[:, fixed_E] > 0.0).astype(np.int64) @ fixed_EG
    row_P = np.arange(len(load_PE))
    for expert in np.flatnonzero(~fixed_E):
        host_R = np.flatnonzero(hosts_EG[expert])
        target_P = host_R[np.argmin(active_PG[:, host_R], axis=1)]
        load_PG[row_P, target_P] += load_PE[:, expert]
        active_PG[row_P, target_P] += load_PE[:, expert] > 0.0
