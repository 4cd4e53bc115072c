"""A plan with ordered nodes: its placement and the price of the links that stay slow."""

from collections.abc import Iterator, Mapping
from typing import Final

from profilers.imports.link_matrix import LinkMatrix
from tuner.config.train import TrainDecision
from tuner.plans.stage_placement import NodeOrder, StageDevices, StagePlacement
from tuner.plans.train import Plan
from tuner.search.nodes.choice import choose_on_links, runners_up_on_links
from tuner.search.nodes.expected_step import slowed
from tuner.search.nodes.headroom import with_headroom_on_links
from tuner.search.nodes.node_order import OrderedNodes, order_nodes
from tuner.search.nodes.traffic import obstacle, traffic
from tuner.spec.cluster import Cluster, Pool
from tuner.units import format_ratio, format_s

LEAST_RATIO: Final = 1e-3
"""Share of a step below which slow links are not noted."""


def with_node_order(
    plan: Plan, links: Mapping[str, LinkMatrix], *, cluster: Cluster, time_limit_s: float
) -> Plan:
    """Order the nodes of every pool with measured links, and price the links that stay slow.

    Args:
        plan: of one pool, or of several with its placement; without a decision it is returned.
        links: by pool.
        cluster: of the spec, whose pools were measured.
        time_limit_s: of the search over orders of each pool; on one pool half of it is for the
            runners-up.

    Raises:
        SpecError: a matrix is of fewer nodes than the plan runs on.
    """
    pools = {pool.name: pool for pool in cluster.pools}
    if plan.decision is None or not links:
        return plan
    known_orders: tuple[tuple[str, ...], ...] = ()
    slow_s_of: Mapping[TrainDecision, float] = {}
    before = plan
    if plan.placement is None:
        time_limit_s /= 2.0
        ((name, matrix),) = links.items()
        on_links = choose_on_links(plan, matrix, pool=pools[name], time_limit_s=time_limit_s)
        plan, known_orders = on_links.plan, () if on_links.nodes is None else (on_links.nodes,)
        slow_s_of = on_links.slow_s_of
    decision, predicted = plan.decision, plan.predicted
    assert decision is not None
    assert predicted is not None
    placement = plan.placement or _on_one_pool(decision, plan.cluster.pools[0])
    ranks_of = _ranks_by_pool(placement, decision)
    ordered: dict[str, OrderedNodes] = {}
    notes = []
    for name in (name for name in links if name in ranks_of):
        if why := obstacle(decision, pools[name]):
            notes.append(f"nodes of pool {name!r} are not ordered by their links: {why}")
            continue
        sent = traffic(
            decision,
            predicted,
            model=plan.model,
            goal=plan.goal,
            pool=pools[name],
            ranks=ranks_of[name],
        )
        ordered[name] = order_nodes(
            sent,
            links[name],
            pool=pools[name],
            time_limit_s=time_limit_s,
            known=known_orders,
        )
        notes += _notes(pools[name], ordered[name], step_s=predicted.step_time_s)
    slow_s = sum(order.slow_s for order in ordered.values())
    orders = tuple(
        _node_order(name, order, predicted.step_time_s) for name, order in ordered.items()
    )
    made = plan.model_copy(
        update={
            "placement": _named(placement, orders) if orders else plan.placement,
            "predicted": slowed(predicted, slow_s),
            "provenance": plan.provenance.model_copy(
                update={"notes": (*plan.provenance.notes, *notes)}
            ),
        }
    )
    if not any(slow_s_of.values()):
        return made
    return with_headroom_on_links(
        runners_up_on_links(made, slow_s_of), before=before, priced=slow_s_of.keys()
    )


def _on_one_pool(decision: TrainDecision, pool: Pool) -> StagePlacement:
    devices = decision.num_devices // decision.pipeline_model_parallel_size
    nodes = -(-decision.num_devices // pool.devices_per_node)
    unused = pool.num_devices - decision.num_devices
    return StagePlacement(
        stages=tuple(
            StageDevices(pool=pool.name, layers=layers, devices=devices)
            for layers in decision.pipeline_layout
        ),
        hosts=tuple(f"{pool.name}-{node}" for node in range(nodes)),
        unused_devices={pool.name: unused} if unused else {},
    )


def _ranks_by_pool(placement: StagePlacement, decision: TrainDecision) -> dict[str, range]:
    """Pipeline ranks of each pool, which are contiguous."""
    names = [stage.pool for stage in placement.stages][: decision.pipeline_model_parallel_size]
    return {name: range(names.index(name), names.index(name) + names.count(name)) for name in names}


def _named(placement: StagePlacement, orders: tuple[NodeOrder, ...]) -> StagePlacement:
    """Replace placeholder hosts by measured nodes."""
    named = {order.pool: order.nodes for order in orders}
    hosts: list[str] = []
    for pool in dict.fromkeys(stage.pool for stage in placement.stages):
        unnamed = [host for host in placement.hosts if host.rpartition("-")[0] == pool]
        hosts += named.get(pool, unnamed)
    return placement.model_copy(update={"hosts": tuple(hosts), "node_orders": orders})


def _node_order(pool: str, order: OrderedNodes, step_s: float) -> NodeOrder:
    return NodeOrder(
        pool=pool,
        nodes=order.nodes,
        spare=order.spare,
        step_time_before_s=step_s + order.slow_before_s,
        step_time_after_s=step_s + order.slow_s,
        bound_s=step_s + order.slow_bound_s,
    )


def _notes(pool: Pool, order: OrderedNodes, *, step_s: float) -> Iterator[str]:
    if order.slow_s > LEAST_RATIO * step_s:
        yield (
            f"slow links of pool {pool.name!r} take {format_s(order.slow_s)} of a step "
            f"({format_ratio(order.slow_s / (step_s + order.slow_s))}) in the best order found; "
            "the certificate assumes that every link is the usual one"
        )
    if pool.oversubscription > 1.0:
        yield (
            f"pool {pool.name!r} states oversubscription {pool.oversubscription:g} and a "
            "link_matrix: oversubscription is counted twice where the matrix shows it"
        )
