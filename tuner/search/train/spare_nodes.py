"""The numbers of training and spare nodes of a pool, where the spec leaves them open.

Every number U of training nodes, from all to half, is searched for its fastest layout, the largest
first, and the run is priced with every number S of spares that the pool has left, up to one with
which it hardly ever waits. The best pair by the spec's objective (tuner/faults/spare_choice.py) is
then planned like a spec that states it. Layouts that cannot be part of a better pair are not
searched to the end: no share exceeds 1, so that a step must be shorter than tokens / goodput of the
best so far, or than its bill / U where the bill counts.

Where the job may go on with fewer nodes, the layout for that is the fastest of fewer nodes among
those found, if the engine restores its checkpoints; so the fewest that were searched are priced as
waiting.

Exact are the shares and the choice among the pairs; the steps are the search's closed form. Not
covered: several pools, measured links between nodes (which nodes are left is not known), a choice
on fewer than half of the nodes.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from profilers.files import read_bounded
from tuner.config.train import TrainDecision
from tuner.errors import SpecError
from tuner.faults.fewer_nodes import LayoutShares, continued_run, layout_shares, node_losses
from tuner.faults.reliability import FailureModel, Jobs, waiting_ratio
from tuner.faults.run_shares import run_shares
from tuner.faults.spare_choice import (
    CLOSE_RATIO,
    NodeRatio,
    SpareChoice,
    best_by_spares,
    choose_numbers,
)
from tuner.plans.train import Plan
from tuner.search.progress import PlanningEvent, ignore_progress
from tuner.search.settings import SearchSettings
from tuner.search.train.fewer_nodes import LEAST_SHARE, fewer_nodes_obstacle, kept_limits
from tuner.search.train.priced_layouts import Fastest, PricedLayouts
from tuner.spec.cluster import Pool
from tuner.spec.files import LARGEST_FILE_BYTES
from tuner.spec.goal import Objective
from tuner.spec.node_numbers import NodeNumbers, changed_spec, changed_yaml
from tuner.spec.spec import Spec

MOST_AHEAD: Final = 8
"""Numbers of nodes among which the time that is left is shared at least."""
NEVER_WAITS: Final = 1e-6
"""Share of the time that a run waits for repairs, with which further spares bring nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecidedNodes:
    """A spec that states its numbers of nodes, and how they were chosen."""

    spec: Spec
    spec_yaml: bytes
    """Content of a spec file with the same numbers."""
    choice: SpareChoice | None = None
    """Choice of the numbers; None where the spec states them, or no layout fits on any number of
    nodes."""

    @classmethod
    def of(
        cls, spec: Spec, numbers: NodeNumbers, *, choice: SpareChoice | None = None
    ) -> "DecidedNodes":
        """Write the numbers into a spec."""
        return cls(
            spec=changed_spec(spec, numbers.values),
            spec_yaml=changed_yaml(spec, numbers.values),
            choice=choice,
        )

    @property
    def sha256(self) -> str:
        """Return the SHA-256 of `spec_yaml`."""
        return hashlib.sha256(self.spec_yaml).hexdigest()


def decide_spare_nodes(
    spec: Spec, *, price: Callable[[Pool], PricedLayouts], settings: SearchSettings
) -> DecidedNodes:
    """Choose the numbers of nodes where the spec leaves them open.

    Args:
        spec: of the job.
        price: prices layouts on a pool.
        settings: of the searches, all of which share the time limit.

    Raises:
        SpecError: the numbers are open and there are several pools, or measured links.
    """
    stated = spec.goal.reliability
    if stated is None or stated.spare_nodes != "auto":
        text = read_bounded(spec.path, most_bytes=LARGEST_FILE_BYTES)
        return DecidedNodes(spec=spec, spec_yaml=text)
    _refuse_uncovered(spec)
    settings.watch(PlanningEvent(stage="nodes", text="numbers of training and spare nodes"))
    pool, objective = spec.cluster.pools[0], stated.objective
    searched = _search(spec, price=price, settings=settings)
    layouts = searched.layouts
    pairs = [pair for layout in layouts for pair in _pairs(layout, layouts, spec)]
    if not pairs:
        return DecidedNodes.of(spec, NodeNumbers(nodes=pool.nodes, spare_nodes=0))
    chosen = choose_numbers(pairs, objective)
    numbers = NodeNumbers(nodes=chosen.nodes + chosen.spare_nodes, spare_nodes=chosen.spare_nodes)
    choice = SpareChoice(
        objective=objective,
        pool_nodes=pool.nodes,
        chosen=chosen,
        compared=best_by_spares(pairs, objective),
        fewest_searched=searched.fewest,
        is_complete=searched.is_complete,
        num_priced=len(pairs),
    )
    return DecidedNodes.of(spec, numbers, choice=choice)


def with_choice(plan: Plan, decided: DecidedNodes) -> Plan:
    """Return a plan of the chosen numbers with the choice in `predicted.run`."""
    predicted = plan.predicted
    if predicted is None or predicted.run is None or decided.choice is None:
        return plan
    run = predicted.run.model_copy(update={"spares": decided.choice})
    return plan.model_copy(update={"predicted": predicted.model_copy(update={"run": run})})


def _refuse_uncovered(spec: Spec) -> None:
    pools = spec.cluster.pools
    if len(pools) > 1:
        names = ", ".join(repr(pool.name) for pool in pools)
        raise SpecError(
            "goal.reliability.spare_nodes: auto chooses for one pool, and there are several:"
            f" {names}; state a number"
        )
    if pools[0].link_matrix is not None:
        raise SpecError(
            "goal.reliability.spare_nodes: auto does not know which nodes of link_matrix would"
            " train; state a number, or leave the matrix out"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """The fastest layout of a number of nodes, and its run if no node were ever missed."""

    nodes: int
    decision: TrainDecision
    step_s: float
    jobs: Jobs
    """Jobs of the run without spares."""
    reliability: FailureModel
    training: float
    """Share of the time that advances training."""
    shares: LayoutShares
    on_shared_storage: LayoutShares
    """Shares with checkpoints on shared storage alone."""
    keeps_host_copies: bool
    """Whether hosts keep copies beside checkpoints on shared storage."""

    @classmethod
    def of(cls, nodes: int, fastest: Fastest, spec: Spec, priced: PricedLayouts) -> "_Layout":
        step_s = fastest.step_s
        jobs, reliability = priced.failure_model(spec, fastest.decision)
        assert reliability is not None
        shares = run_shares(jobs, replace(reliability, repair_s=0.0), step_s=step_s)
        shared = run_shares(jobs, replace(reliability, repair_s=0.0, host=None), step_s=step_s)
        return cls(
            nodes=nodes,
            decision=fastest.decision,
            step_s=step_s,
            jobs=jobs,
            reliability=reliability,
            training=shares.training,
            shares=layout_shares(shares, jobs, reliability, step_s=step_s),
            on_shared_storage=layout_shares(shared, jobs, reliability, step_s=step_s),
            keeps_host_copies=shares.levels is not None
            and shares.levels.host_interval_s is not None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Searched:
    """Numbers of training nodes that were searched."""

    layouts: list[_Layout]
    """Fastest layout of each number of nodes that may be best."""
    fewest: int
    is_complete: bool
    """Whether there was time for all numbers."""


def _search(
    spec: Spec, *, price: Callable[[Pool], PricedLayouts], settings: SearchSettings
) -> "_Searched":
    """Search every number of training nodes that may be best."""
    pool, stated = spec.cluster.pools[0], spec.goal.reliability
    assert stated is not None
    deadline, layouts = settings.begin(), list[_Layout]()
    # Nodes of a scale-up domain go together.
    together = max(1, math.ceil(pool.domain / pool.devices_per_node))
    fewest = pool.nodes
    below = _Below(objective=stated.objective, is_open=stated.without_spare == "wait")
    numbers = range(pool.nodes, max(1, math.ceil(LEAST_SHARE * pool.nodes)) - 1, -together)
    for place, nodes in enumerate(numbers):
        if layouts and not deadline.left_s:
            break
        left = replace(
            settings,
            time_limit_s=deadline.left_s / min(len(numbers) - place, MOST_AHEAD),
            top=1,
            band_ratio=0.0,
            below_s=below.step_s(nodes),
            watch=ignore_progress,
        )
        sized_spec = changed_spec(spec, NodeNumbers(nodes=nodes, spare_nodes=0).values)
        priced = price(sized_spec.cluster.pools[0])
        fastest = priced.fastest(sized_spec, left)
        fewest = nodes
        if fastest is None:
            continue
        layout = _Layout.of(nodes, fastest, sized_spec, priced)
        layouts.append(layout)
        below.see(_pairs(layout, (), spec))
    return _Searched(layouts=layouts, fewest=fewest, is_complete=fewest == numbers[-1])


@dataclass(slots=True, kw_only=True)
class _Below:
    """Steps that may still be part of a better pair; mutable, as it follows the best so far."""

    objective: Objective
    is_open: bool
    """Slower layouts are of no use; otherwise they may be those of fewer nodes."""
    least_s: float = math.inf
    """Smallest seconds of a step over its effective time ratio so far, times all nodes where the
    objective is cost."""

    def see(self, pairs: Sequence[NodeRatio]) -> None:
        for pair in pairs:
            if pair.effective_time_ratio > 0.0:
                own_s = pair.step_time_s / pair.effective_time_ratio
                own_s *= pair.nodes + pair.spare_nodes if self.objective == "cost" else 1.0
                self.least_s = min(self.least_s, own_s)

    def step_s(self, nodes: int) -> float:
        if not self.is_open:
            return math.inf
        if self.objective == "cost":
            return self.least_s / nodes
        return self.least_s / (1.0 - CLOSE_RATIO)


def _pairs(layout: _Layout, others: Sequence[_Layout], spec: Spec) -> list[NodeRatio]:
    """Price a layout with every number of spares.

    Args:
        layout: of the training nodes.
        others: layouts, of which some may be of fewer nodes.
        spec: of the job.
    """
    pool, stated = spec.cluster.pools[0], spec.goal.reliability
    assert stated is not None
    tokens = spec.goal.tokens_per_step
    fewer = _fewer(layout, others, spec) if stated.without_spare != "wait" else None
    pairs: list[NodeRatio] = []
    for spares in range(pool.nodes - layout.nodes + 1):
        jobs = replace(layout.jobs, spare_nodes=float(spares))
        waiting = float(waiting_ratio(jobs, layout.reliability))
        ratio = layout.training * (1.0 - waiting)
        if fewer is not None:
            losses = node_losses(
                jobs,
                fewer.jobs,
                layout.reliability,
                idle_nodes=layout.nodes - 1 - fewer.nodes,
            )
            fewer_shares = fewer.shares if layout.keeps_host_copies else fewer.on_shared_storage
            continued = continued_run(losses, layout.shares, fewer_shares).training
            always = stated.without_spare == "continue"
            ratio = continued if always else max(ratio, continued)
        if ratio > 0.0:
            goodput = tokens * ratio / layout.step_s
            devices = (layout.nodes + spares) * pool.devices_per_node
            pairs.append(
                NodeRatio(
                    nodes=layout.nodes,
                    spare_nodes=spares,
                    step_time_s=layout.step_s,
                    effective_time_ratio=min(1.0, ratio),
                    goodput_tokens_per_s=goodput,
                    device_s_per_token=devices / goodput,
                )
            )
        if waiting < NEVER_WAITS:
            break
    return pairs


def _fewer(layout: _Layout, others: Sequence[_Layout], spec: Spec) -> _Layout | None:
    """Return the fastest layout of fewer nodes that restores its checkpoints; None: none does."""
    if fewer_nodes_obstacle(
        spec, layout.decision, nodes=layout.nodes, on_hosts=layout.keeps_host_copies
    ):
        return None
    limits = kept_limits(layout.decision, spec)
    restoring = [
        candidate
        for candidate in others
        if candidate.nodes < layout.nodes
        and all(getattr(candidate.decision, name) in allowed for name, allowed in limits.items())
    ]
    return min(restoring, key=lambda candidate: candidate.step_s, default=None)
