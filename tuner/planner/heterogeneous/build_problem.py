"""What a search over several pools is asked: the same run, once for the machines of each pool."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from tuner.costs.analytic.calibration import Residuals
from tuner.costs.analytic.measured_profile import MeasuredProfile
from tuner.errors import SpecError
from tuner.plan import Band
from tuner.planner.analytic.build_problem import Site, question_of, site_of
from tuner.planner.analytic.extrapolation import EXTRAPOLATED_FACTOR, asked_beyond
from tuner.planner.analytic.problem import Question
from tuner.planner.analytic.regimes import band_for
from tuner.planner.analytic.releases import priced_release
from tuner.planner.analytic.ties import ratios_on
from tuner.planner.heterogeneous.spares import spares_by_pool
from tuner.planner.ratios import Ratios, widest
from tuner.spec.cluster import Cluster, Pool
from tuner.spec.spec import Spec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolsQuestion:
    """One run on several pools; model, batch, targets and limits are the same in all of them."""

    cluster: Cluster
    """Spare nodes taken off."""
    of_pool: tuple[Question, ...]
    """In the order of the cluster's pools; each asks about its pool alone."""
    specs: tuple[Spec, ...]
    """The spec of each pool alone, with its own spare nodes."""
    sites: tuple[Site, ...]
    """Spare nodes not taken off."""
    bands: tuple[Band, ...]
    """Measured over predicted seconds on each pool, lowest and highest."""
    ratios: Ratios
    """The same of the ratio of two chains' seconds, over whichever pools."""

    def with_extrapolation(self) -> "PoolsQuestion":
        """Widen the bands of pools whose profiles were asked beyond what they measured.

        Any of what a search asked counts in full, since chains are not priced once more.
        """
        wider = tuple(
            (low / EXTRAPOLATED_FACTOR, high * EXTRAPOLATED_FACTOR)
            if asked_beyond(own)
            else (low, high)
            for own, (low, high) in zip(self.of_pool, self.bands, strict=True)
        )
        is_beyond = any(asked_beyond(own) for own in self.of_pool)
        ratios = self.ratios.widened(EXTRAPOLATED_FACTOR) if is_beyond else self.ratios
        return replace(self, bands=wider, ratios=ratios)

    @property
    def alike(self) -> Question:
        """Any of the questions, for what is the same in all."""
        return self.of_pool[0]

    @property
    def num_pools(self) -> int:
        """P."""
        return len(self.of_pool)


def pools_question(
    spec: Spec,
    *,
    residuals: Residuals | None,
    measured: Mapping[str, MeasuredProfile] = MappingProxyType({}),
) -> PoolsQuestion:
    """Ask what a spec asks, of each of its pools.

    Args:
        spec: with `device` on every pool and links between them.
        residuals: corrections and bands; None prices with the generic constants.
        measured: profiles of pools, by name.

    Raises:
        SpecError: a pool has no device description, cannot compute in the precision, or nothing
            joins it to the others; or the search limits what the partition decides.
        UnknownDeviceError: a device has no description.
    """
    cluster = spec.cluster
    _refuse_unjoined(cluster)
    if spec.search.pipeline_model_parallel_size is not None:
        raise SpecError(
            "search.pipeline_model_parallel_size: over unlike pools the partition decides how many "
            "stages there are; leave it out"
        )
    for pool in cluster.pools:
        if pool.device is None:
            raise SpecError(
                f"cluster.pools: {pool.name!r} has no 'device'; unlike pools are planned from "
                "device descriptions, e.g. device: h100-sxm"
            )
    sites = tuple(
        site_of(pool, residuals=residuals, measured=measured.get(pool.name))
        for pool in cluster.pools
    )
    specs = _specs(spec)
    questions = tuple(question_of(own, site) for own, site in zip(specs, sites, strict=True))
    bands = tuple(
        band_for(
            spec.emit,
            site.sheet,
            site.residuals,
            precision=spec.goal.precision.value,
            release=priced_release(spec.emit, spec.goal.engine, site.residuals).stated,
        )
        for site in sites
    )
    return PoolsQuestion(
        cluster=Cluster(
            pools=tuple(
                pool.model_copy(update={"nodes": own.num_devices // pool.devices_per_node})
                for pool, own in zip(cluster.pools, questions, strict=True)
            ),
            links=cluster.links,
        ),
        of_pool=questions,
        specs=specs,
        sites=sites,
        bands=bands,
        ratios=widest(
            [ratios_on(spec, site, band=band) for site, band in zip(sites, bands, strict=True)]
        ),
    )


def _specs(spec: Spec) -> tuple[Spec, ...]:
    pools, stated = spec.cluster.pools, spec.goal.reliability
    spares = spares_by_pool(pools, 0 if stated is None else stated.spare_nodes)

    def own(pool: Pool, spare_nodes: int) -> Spec:
        kept = None if stated is None else stated.model_copy(update={"spare_nodes": spare_nodes})
        goal = spec.goal.model_copy(update={"reliability": kept})
        return spec.model_copy(update={"cluster": Cluster(pools=(pool,)), "goal": goal})

    return tuple(own(pool, spare_nodes) for pool, spare_nodes in zip(pools, spares, strict=True))


def _refuse_unjoined(cluster: Cluster) -> None:
    """Every pool must be reachable from the first over links."""
    names = [pool.name for pool in cluster.pools]
    reached = {names[0]}
    for _ in names:
        for link in cluster.links:
            if reached & set(link.between):
                reached |= set(link.between)
    apart = [name for name in names if name not in reached]
    if apart:
        raise SpecError(
            f"cluster.links: nothing joins pool {apart[0]!r} to {names[0]!r}; state {{between: "
            f"[{names[0]}, {apart[0]}], bandwidth: ..., latency: ...}} or keep one pool"
        )
