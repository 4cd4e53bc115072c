"""Numbers of training and spare nodes, and the alternatives compared: `predicted.run.spares`.

With U nodes that train and S spares, step(U) the seconds of the fastest layout of U nodes, and
share(U, S) the share of the wall clock that advances training:

    goodput   tokens of a step * share(U, S) / step(U)
    bill      (U + S) * devices of a node / goodput, device seconds per token; spares and all time
              that is lost or waited are paid for

`share` is that of tuner/faults/run_shares.py, or of tuner/faults/fewer_nodes.py where the job goes
on with fewer nodes. Only waiting depends on S where it does not, by a factor 1 - B(S + 1, a).
"""

from collections.abc import Sequence
from typing import Annotated, Final

from pydantic import Field

from profilers.records import Record, Seconds
from tuner.faults.run_shares import Ratio, Whole
from tuner.spec.goal import Objective

CLOSE_RATIO: Final = 1e-3
"""Share of the best goodput within which choices tie; the one with the fewest nodes is chosen."""
MOST_COMPARED: Final = 12


class NodeRatio(Record):
    """Forecast of a run for one number of training and spare nodes."""

    nodes: Whole
    """Nodes that train."""
    spare_nodes: Whole
    step_time_s: Seconds
    """Step time of the fastest layout that the search found for this many training nodes."""
    effective_time_ratio: Ratio
    goodput_tokens_per_s: Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
    device_s_per_token: Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
    """Device seconds, spares included, paid for each token."""


class SpareChoice(Record):
    """The decision, and what it was compared with."""

    objective: Objective
    pool_nodes: Whole
    """Nodes of the spec's pool; those that neither train nor are spares are not allocated."""
    chosen: NodeRatio
    compared: tuple[NodeRatio, ...]
    """The best of each number of spares, the chosen one's too, best first."""
    fewest_searched: Whole
    """Fewest training nodes that were searched."""
    is_complete: bool
    """All numbers from all nodes to half were searched."""
    num_priced: Whole
    """Pairs of numbers whose share was computed."""


def choose_numbers(priced: Sequence[NodeRatio], objective: Objective) -> NodeRatio:
    """Choose the best pair for an objective.

    Args:
        priced: one or more.
        objective: `cost` is the least bill; `goodput` the most, see `CLOSE_RATIO`.
    """
    if objective == "cost":
        return min(priced, key=lambda pair: pair.device_s_per_token)
    best = max(pair.goodput_tokens_per_s for pair in priced)
    close = [pair for pair in priced if pair.goodput_tokens_per_s >= best * (1.0 - CLOSE_RATIO)]
    return min(close, key=lambda pair: (pair.nodes + pair.spare_nodes, -pair.goodput_tokens_per_s))


def best_by_spares(priced: Sequence[NodeRatio], objective: Objective) -> tuple[NodeRatio, ...]:
    """Return the best pair of each number of spares, best first, `MOST_COMPARED` at most."""
    by_spares: dict[int, list[NodeRatio]] = {}
    for pair in priced:
        by_spares.setdefault(pair.spare_nodes, []).append(pair)
    best = [choose_numbers(group, objective) for group in by_spares.values()]
    if objective == "cost":
        best.sort(key=lambda candidate: candidate.device_s_per_token)
    else:
        best.sort(key=lambda candidate: -candidate.goodput_tokens_per_s)
    return tuple(best[:MOST_COMPARED])
