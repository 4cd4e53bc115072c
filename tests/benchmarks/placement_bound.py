"""Infeasibility of even loads with few slots: `python tests/benchmarks/placement_bound.py`.

    E experts   r copies, each with an even share   G ranks of K slots

Under node-local replicas, an expert on at most one rank of each node, or on ranks of one node only,
has even shares, so that a layer is a packing of G K copies in G ranks. For a largest load of T
means, the linear program

    least sum of y_f over fillings f of at most K shares that sum to at most T
    such that every copy is in a filling, every expert has r copies for one r, and all
    copies are at most G K; y and the choice of r may be fractions

needs at most G ranks wherever a placement of these shares exists (Gilmore and Gomory, Operations
Research 9(6), 1961). Above G it proves T infeasible; at most G it proves nothing. It is solved by
its dual, with violated fillings added, on shares rounded down to 1/1000 of T, which weakens the
bound. Uneven shares are not covered; they can only lower the feasible load.

Printed for each layer of the long recordings, on the hold-out passes: lower and upper limit of the
ranks that the program needs for each T. The lower limit is proven, as prices over the price of the
most expensive filling satisfy every filling (Farley, Operations Research 38(5), 1990).
"""

import argparse
import bisect
import itertools
import sys
from pathlib import Path

import numpy as np
from ortools.linear_solver import pywraplp

from profilers.routing.store import read_recording
from solvers.placement.ranks import Floats

WIDE = Path(__file__).parents[2] / "examples/routing"
GRID = 1000
MOST_COPIES = 9
ROUNDS = 60
LIMITS = (1.01, 1.02)


def ranks_needed(share_E: Floats, *, ranks: int, slots: int, limit: float) -> tuple[float, float]:
    """Return what the program needs at least and at most, as far as it decides about `ranks`.

    Args:
        share_E: loads of the experts over a rank's mean.
        ranks: G.
        slots: K.
        limit: T.
    """
    options = [
        (expert, copies, int(share / copies / limit * GRID))
        for expert, share in enumerate(share_E.tolist())
        for copies in range(1, MOST_COPIES + 1)
        if share / copies <= limit
    ]
    sizes = sorted({size for _, _, size in options if size})
    solver = pywraplp.Solver.CreateSolver("GLOP")
    price = {size: solver.NumVar(0.0, 1.0, f"price {size}") for size in sizes}
    slot = solver.NumVar(0.0, 10.0, "slot")
    worth = [solver.NumVar(-100.0, 100.0, f"expert {expert}") for expert in range(len(share_E))]
    for expert, copies, size in options:
        cost = copies * (price[size] if size else 0.0) + copies * slot
        solver.Add(worth[expert] <= cost)
    for less, more in itertools.pairwise(sizes):
        solver.Add(price[less] <= price[more])
    for size in sizes:
        solver.Add(min(slots, GRID // size) * price[size] <= 1.0)
        beside = sizes[max(bisect.bisect_right(sizes, GRID - size) - 1, 0)]
        if size + beside <= GRID:
            solver.Add(price[size] + price[beside] <= 1.0)
    solver.Maximize(solver.Sum(worth) - ranks * slots * slot)
    least = -np.inf
    for _ in range(ROUNDS):
        solver.Solve()
        value = float(solver.Objective().Value())
        price_X = np.zeros(GRID + 1)
        price_X[sizes] = [price[size].solution_value() for size in sizes]
        filling = dearest(price_X, slots=slots)
        violated = max(float(sum(price_X[size] for size in filling)), 1.0)
        least = max(least, value / violated)
        if value <= ranks + 1e-6 or least > ranks + 1e-6:
            break
        solver.Add(solver.Sum([price[size] for size in filling]) <= 1.0)
    return least, value


def dearest(price_X: Floats, *, slots: int) -> list[int]:
    """Return the sizes of the most expensive filling, by dynamic programming over slots and
    load."""
    best_X, chosen = np.zeros(GRID + 1), []
    for _ in range(slots):
        value_XX = np.full((GRID + 1, GRID + 1), -np.inf)
        for room in range(GRID + 1):
            value_XX[room, : room + 1] = price_X[: room + 1] + best_X[room::-1]
        chosen.append(value_XX.argmax(axis=1))
        best_X = value_XX.max(axis=1)
    result, room = [], GRID
    for size_X in reversed(chosen):
        size = int(size_X[room])
        room -= size
        if price_X[size] > 0.0:
            result.append(size)
    return result


def main() -> int:
    """Print a line a recording and layer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="recordings in examples/routing")
    parser.add_argument("--ranks", type=int, default=72)
    parser.add_argument("--slots", type=int, default=4)
    chosen = parser.parse_args()
    for name in chosen.names or ("long-python", "long-documents", "long-headers"):
        count_PLE = read_recording(WIDE / name).count_PLE
        mean_LE = count_PLE[len(count_PLE) // 2 :].mean(axis=0)
        for layer, load_E in enumerate(mean_LE):
            share_E = load_E / load_E.sum() * chosen.ranks
            needed = [
                ranks_needed(share_E, ranks=chosen.ranks, slots=chosen.slots, limit=limit)
                for limit in LIMITS
            ]
            result = ", ".join(
                f"{limit}: {least:.2f} to {most:.2f}{' RULED OUT' * (least > chosen.ranks + 1e-6)}"
                for limit, (least, most) in zip(LIMITS, needed, strict=True)
            )
            sys.stdout.write(f"{name}, layer {layer}, {chosen.ranks} ranks: {result}\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
