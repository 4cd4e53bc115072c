from typing import Any

import numpy as np
import pytest

from solvers.registry import PARTITION
from solvers.result import Status
from tests.expect import present
from tuner.costs.train.columns_of import nic_bytes_per_s
from tuner.errors import SpecError, UnknownDeviceError
from tuner.search.train.pools.chains import (
    PoolPrices,
    partition_problem,
)
from tuner.spec.cluster import Cluster, Link, Pool

LAYERS = 12


def pool(name: str, **changes: Any) -> Pool:
    given: dict[str, Any] = {
        "name": name,
        "device": "h100-sxm",
        "nodes": 4,
        "devices_per_node": 8,
        "nic": 40e9,
    }
    return Pool(**(given | changes))


def prices(layer_s: float, **changes: Any) -> PoolPrices:
    given: dict[str, Any] = {
        "stage_devices": 16,
        "time_s_L": np.full(LAYERS, layer_s),
        "static_bytes_L": np.full(LAYERS, 6e9),
        "saved_bytes_L": np.full(LAYERS, 0.5e9),
        "memory_limit_bytes": 80 * 10**9,
        "nic_bytes_per_s": 40e9,
    }
    return PoolPrices(**(given | changes))


def cluster(*, links: tuple[Link, ...] | None = None, **second: Any) -> Cluster:
    joined = Link(between=("new", "old"), bandwidth=20e9, latency=1e-4)
    return Cluster(
        pools=(pool("new"), pool("old", **second)), links=(joined,) if links is None else links
    )


def test_a_card_is_shared_by_the_devices_behind_it() -> None:
    assert nic_bytes_per_s(pool("p")) == 40e9
    # 4 NICs of 40 GB/s for 8 devices, two to one above them
    assert nic_bytes_per_s(pool("p", nics_per_node=4, oversubscription=2.0)) == 10e9


def test_a_device_description_states_the_card_where_the_spec_does_not() -> None:
    assert nic_bytes_per_s(pool("p", nic=None)) == 50e9
    # two NICs of 50 GB/s for 8 devices
    assert nic_bytes_per_s(pool("p", nic=None, nics_per_node=2)) == 12.5e9
    with pytest.raises(UnknownDeviceError, match="'h1000'"):
        nic_bytes_per_s(pool("p", nic=None, device="h1000"))
    with pytest.raises(SpecError, match="pool 'p' states no 'nic'"):
        nic_bytes_per_s(pool("p", nic=None, device=None, profile="profiles/p"))


def test_hops_by_hand() -> None:
    problem = partition_problem(
        cluster(), [prices(0.01), prices(0.02)], boundary_bytes=6.4e9, num_microbatches=16
    )
    assert problem.pools == ("new", "old")
    assert problem.max_stages_P == (2, 2)  # 32 devices, 16 to a stage
    # 16 NICs of 40 GB/s carry 6.4 GB in 10 ms; the link of 20 GB/s in 320 ms and its latency.
    assert problem.hop_s_PP.ravel() == pytest.approx([0.01, 0.3201, 0.3201, 0.01])


def test_a_link_is_no_faster_than_its_nics() -> None:
    wide = Link(between=("old", "new"), bandwidth=1e15, latency=0.0)
    problem = partition_problem(
        cluster(links=(wide,)),
        [prices(0.01), prices(0.02, nic_bytes_per_s=1e9)],
        boundary_bytes=6.4e9,
        num_microbatches=16,
    )
    assert problem.hop_s_PP[0, 1] == problem.hop_s_PP[1, 0] == pytest.approx(0.4)


def test_pools_without_a_link_are_never_joined() -> None:
    problem = partition_problem(
        cluster(links=()), [prices(0.01), prices(0.02)], boundary_bytes=1e6, num_microbatches=16
    )
    assert np.isinf(problem.hop_s_PP[0, 1])
    outcome = PARTITION.solve(problem, time_limit_s=30.0)
    assert len({stage.pool for stage in present(outcome.solution).stages}) == 1


def test_the_slower_pool_holds_fewer_layers_of_one_run() -> None:
    problem = partition_problem(
        cluster(), [prices(0.01), prices(0.02)], boundary_bytes=64e6, num_microbatches=64
    )
    outcome = PARTITION.solve(problem, time_limit_s=30.0)
    assert outcome.status is Status.OPTIMAL
    # 4 + 4 layers at 10 ms and 2 + 2 at 20 ms: every stage takes 40 ms.
    actual = sorted((stage.pool, stage.layers) for stage in present(outcome.solution).stages)
    assert actual == [(0, 4), (0, 4), (1, 2), (1, 2)]


def test_a_stage_that_no_pool_can_hold_is_said() -> None:
    many = prices(0.01, stage_devices=64)
    with pytest.raises(SpecError, match="a stage takes 64 devices, the largest pool has 32; lower"):
        partition_problem(cluster(), [many, many], boundary_bytes=1.0, num_microbatches=1)
    with pytest.raises(ValueError, match="1 prices for 2 pools"):
        partition_problem(cluster(), [many], boundary_bytes=1.0, num_microbatches=1)
