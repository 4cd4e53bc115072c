"""The problem of a search over several pools: one training problem per pool, with its spares."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from tuner.costs.train.calibration import Residuals
from tuner.costs.train.measured_profile import MeasuredProfile
from tuner.errors import SpecError
from tuner.plans.train import Band
from tuner.search.ratios import Ratios, widest
from tuner.search.train.build_problem import PricedPool, build_problem, price_pool
from tuner.search.train.extrapolation import EXTRAPOLATED_FACTOR, extrapolated_by_search
from tuner.search.train.problem import TrainProblem
from tuner.search.train.ties import pool_band, pool_ratios
from tuner.spec.cluster import Cluster, Pool
from tuner.spec.goal import TWO_LEVELS
from tuner.spec.spec import Spec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolsProblem:
    """One run on several pools; model, batch, targets and limits are the same in all of them."""

    cluster: Cluster
    """Spare nodes taken off."""
    by_pool: tuple[TrainProblem, ...]
    """Training problems in the order of the cluster's pools; each has a single pool."""
    specs: tuple[Spec, ...]
    """The spec for each pool by itself, with its own spare nodes."""
    priced_pools: tuple[PricedPool, ...]
    """Spare nodes not taken off."""
    bands: tuple[Band, ...]
    """Measured over predicted seconds on each pool, lowest and highest."""
    widenings: tuple[str, ...]
    """Published runs that each of these bands lacks, in a line; may be empty."""
    ratios: Ratios
    """Measured over predicted ratios of two chains' seconds, on any pools."""

    def with_extrapolation(self) -> "PoolsProblem":
        """Widen the bands of pools whose profiles the search extrapolated.

        Every extrapolation of the search counts, since chains are not priced again.
        """
        wider = tuple(
            (low / EXTRAPOLATED_FACTOR, high * EXTRAPOLATED_FACTOR)
            if extrapolated_by_search(problem)
            else (low, high)
            for problem, (low, high) in zip(self.by_pool, self.bands, strict=True)
        )
        is_beyond = any(extrapolated_by_search(problem) for problem in self.by_pool)
        ratios = self.ratios.widened(EXTRAPOLATED_FACTOR) if is_beyond else self.ratios
        return replace(self, bands=wider, ratios=ratios)

    def changed(self, fields: Iterable[Mapping[str, Any]]) -> "PoolsProblem":
        """Return the problem with fields of the pools' problems replaced, in order of the pools."""
        by_pool = zip(self.by_pool, fields, strict=True)
        return replace(self, by_pool=tuple(replace(problem, **some) for problem, some in by_pool))

    @property
    def any_pool(self) -> TrainProblem:
        """One of the problems, for what is the same in all."""
        return self.by_pool[0]

    @property
    def num_pools(self) -> int:
        """P."""
        return len(self.by_pool)


def build_pools_problem(
    spec: Spec,
    *,
    residuals: Residuals | None,
    measured: Mapping[str, MeasuredProfile] = MappingProxyType({}),
) -> PoolsProblem:
    """Build the problem of a spec with several pools.

    Args:
        spec: with `device` on every pool and links between them.
        residuals: corrections and bands; None prices with the generic constants.
        measured: profiles of pools, by name.

    Raises:
        SpecError: a pool has no device description, cannot compute in the precision, or nothing
            joins it to the others; the search limits what the partition decides, or a target needs
            equal stages.
        UnknownDeviceError: a device has no description.
    """
    cluster = spec.cluster
    _refuse_unjoined(cluster)
    if spec.search.pipeline_model_parallel_size is not None:
        raise SpecError(
            "search.pipeline_model_parallel_size: over several pools the partition decides how "
            "many stages there are; leave it out"
        )
    for pool in cluster.pools:
        if pool.device is None:
            raise SpecError(
                f"cluster.pools: {pool.name!r} has no 'device'; several pools are planned from "
                "device descriptions, e.g. device: h100-sxm"
            )
    priced_pools = tuple(
        price_pool(pool, residuals=residuals, measured=measured.get(pool.name))
        for pool in cluster.pools
    )
    specs = _specs(spec)
    problems = tuple(
        _with_equal_replicas(build_problem(pool_spec, priced_pool))
        for pool_spec, priced_pool in zip(specs, priced_pools, strict=True)
    )
    _refuse_host_checkpoints(spec)
    able = problems[0].capabilities
    if not able.uneven_layout:
        raise SpecError(
            f"emit: {' and '.join(able.names)} needs as many layers on every stage, and stages on"
            " several pools hold as many as their devices are fast; keep one pool, or emit"
            " megatron-lm"
        )
    banded = tuple(pool_band(spec, priced_pool) for priced_pool in priced_pools)
    bands = tuple(step_band.edges for step_band in banded)
    return PoolsProblem(
        cluster=Cluster(
            pools=tuple(
                pool.model_copy(update={"nodes": problem.num_devices // pool.devices_per_node})
                for pool, problem in zip(cluster.pools, problems, strict=True)
            ),
            links=cluster.links,
        ),
        by_pool=problems,
        specs=specs,
        priced_pools=priced_pools,
        bands=bands,
        widenings=tuple(step_band.note for step_band in banded),
        ratios=widest(
            [
                pool_ratios(spec, priced_pool, band=band)
                for priced_pool, band in zip(priced_pools, bands, strict=True)
            ]
        ),
    )


def _with_equal_replicas(problem: TrainProblem) -> TrainProblem:
    """Leave out replicas of unequal numbers of micro-batches: pools are searched without them."""
    able = replace(problem.capabilities, unequal_microbatches=False)
    return replace(problem, capabilities=able)


def _refuse_host_checkpoints(spec: Spec) -> None:
    stated = spec.goal.reliability
    if stated is not None and stated.checkpoint.levels == TWO_LEVELS:
        raise SpecError(
            "goal.reliability.checkpoint.levels: checkpoints on hosts are priced on one pool of"
            " identical machines; keep one pool, or write auto"
        )


def _specs(spec: Spec) -> tuple[Spec, ...]:
    pools, stated = spec.cluster.pools, spec.goal.reliability
    spares = spares_by_pool(pools, 0 if stated is None else stated.num_spare_nodes)

    def pool_spec(pool: Pool, spare_nodes: int) -> Spec:
        kept = None if stated is None else stated.model_copy(update={"spare_nodes": spare_nodes})
        goal = spec.goal.model_copy(update={"reliability": kept})
        return spec.model_copy(update={"cluster": Cluster(pools=(pool,)), "goal": goal})

    return tuple(
        pool_spec(pool, spare_nodes) for pool, spare_nodes in zip(pools, spares, strict=True)
    )


def _refuse_unjoined(cluster: Cluster) -> None:
    """Raise SpecError unless every pool is reachable from the first over links."""
    names = [pool.name for pool in cluster.pools]
    reached = {names[0]}
    for _ in names:
        for link in cluster.links:
            if reached & set(link.between):
                reached |= set(link.between)
    unreached = [name for name in names if name not in reached]
    if unreached:
        raise SpecError(
            f"cluster.links: nothing joins pool {unreached[0]!r} to {names[0]!r}; state {{between: "
            f"[{names[0]}, {unreached[0]}], bandwidth: ..., latency: ...}} or keep one pool"
        )


def spares_by_pool(pools: Sequence[Pool], spare_nodes: int) -> tuple[int, ...]:
    """Distribute spare nodes in proportion to the nodes of each pool.

    Each goes to the pool with most nodes per 2 n + 1, n being its spares so far (Sainte-Lague; the
    first of equals), since failures are proportional to nodes. Every pool keeps one working node.

    Raises:
        SpecError: more are kept back than the pools can spare.
    """
    nodes_P = np.array([pool.nodes for pool in pools])
    max_spare = int((nodes_P - 1).sum())
    if spare_nodes > max_spare:
        raise SpecError(
            f"goal.reliability.spare_nodes: {spare_nodes} leaves a pool without nodes; of "
            f"{int(nodes_P.sum())} nodes in {len(pools)} pools keep back {max_spare} at most"
        )
    given_P = np.zeros(len(pools), dtype=np.int64)
    for _ in range(spare_nodes):
        claim_P = np.where(given_P < nodes_P - 1, nodes_P / (2.0 * given_P + 1.0), 0.0)
        given_P[claim_P.argmax()] += 1
    return tuple(given_P.tolist())
