"""The linear program of the best split for one pass and layer, solved by OR-Tools' GLOP.

    G ranks   K replicated experts

The program is stated in lp.py. A simplex is exact but takes milliseconds for each pass and layer.
"""

import numpy as np

from solvers.errors import BackendFailedError
from solvers.placement.ranks import Floats, Ints


def flattest_loads(
    *, fixed_G: Floats, speed_G: Floats, amounts_K: Floats, hosts_K: tuple[Ints, ...]
) -> Floats:
    """Return rank loads whose largest load over speed is least.

    Args:
        fixed_G: load of the experts that have one host.
        speed_G: of the ranks.
        amounts_K: load of each replicated expert.
        hosts_K: the ranks that hold it; none where the amount is 0.

    Raises:
        BackendFailedError: the backend finds no optimum, although there always is one.
    """
    from ortools.linear_solver import pywraplp  # heavy, and needed for few instances

    # Scaled to a largest load of about 1, where the backend's absolute tolerances are meant to lie.
    scale = max(float((fixed_G.sum() + amounts_K.sum()) / speed_G.sum()), 1e-300)
    solver = pywraplp.Solver.CreateSolver("GLOP")
    level = solver.NumVar(0.0, solver.infinity(), "level")
    room_G = [
        solver.Constraint(float(fixed / scale), solver.infinity()) for fixed in fixed_G.tolist()
    ]
    for room, speed in zip(room_G, speed_G.tolist(), strict=True):
        room.SetCoefficient(level, speed)
    flows = []
    for amount, hosts in zip(amounts_K.tolist(), hosts_K, strict=True):
        if not len(hosts):
            continue
        share = solver.Constraint(amount / scale, amount / scale)
        for host in hosts.tolist():
            flow = solver.NumVar(0.0, solver.infinity(), "")
            share.SetCoefficient(flow, 1.0)
            room_G[host].SetCoefficient(flow, -1.0)
            flows.append((host, flow))
    solver.Objective().SetCoefficient(level, 1.0)
    solver.Objective().SetMinimization()
    if solver.Solve() != pywraplp.Solver.OPTIMAL:
        raise BackendFailedError("GLOP finds no best split; use dispatch `even`")
    load_G = np.array(fixed_G, dtype=np.float64)
    for host, flow in flows:
        load_G[host] += flow.solution_value() * scale
    return load_G
