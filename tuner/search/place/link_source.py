"""Links of the pool that ranks are placed on, from the spec and its profile."""

from pathlib import Path

from profilers.store import read_header
from tuner.costs.train.calibration import Residuals
from tuner.costs.train.measured_profile import MeasuredProfile
from tuner.errors import UnknownDeviceError
from tuner.search.nodes.node_order import read_links
from tuner.search.place.links import LinkSource, measured_pairs
from tuner.search.place.prices import pool_hardware
from tuner.spec.cluster import Cluster
from tuner.spec.place import PlaceGoal


def link_source(
    cluster: Cluster | None,
    goal: PlaceGoal,
    *,
    profile: Path | None,
    residuals: Residuals | None,
    measured: MeasuredProfile | None,
) -> LinkSource:
    """Collect what is known of the links of the first pool.

    Args:
        cluster: of the spec; None: nothing is known.
        goal: of the placement.
        profile: of the pool, if any.
        residuals: corrections of datasheets.
        measured: the same profile, where it is of accelerators.

    Raises:
        SpecError: a link matrix is of more or fewer nodes than the pool.
        ProfileUnreadableError: a profile or a link matrix is missing or damaged.
        UnknownDeviceError: no description of the device that the pool names.
    """
    if cluster is None:
        return LinkSource()
    pool = cluster.pools[0]
    pairs, per_node = measured_pairs(profile)
    matrix = read_links(cluster.model_copy(update={"pools": (pool,)})).get(pool.name)
    source = LinkSource(pool=pool, matrix=matrix, pairs=pairs, pairs_per_node=per_node)
    if pool.device is None and measured is None:
        # A CPU profile: no datasheet covers what it did not measure.
        return source
    try:
        own = pool_hardware(pool, goal, residuals=residuals, measured=measured)
    except UnknownDeviceError:
        if pool.device is not None:
            raise
        return source
    hardware = own.hardware
    if measured is not None:
        hardware = measured.linked(hardware, own.constants)
    return LinkSource(
        pool=pool,
        hardware=hardware,
        constants=own.constants,
        matrix=matrix,
        pairs=pairs,
        pairs_per_node=per_node,
    )


def is_of_accelerators(profile: Path) -> bool:
    """Return whether a profile was measured on devices whose description can price what it lacks.

    Raises:
        ProfileUnreadableError: it is missing or damaged.
    """
    return read_header(profile).machine.device_kind == "cuda"
