"""Collectives over a network, against what NCCL's own tests print."""

import numpy as np
import pytest

from tuner.costs.serve.ops import collective
from tuner.devices.catalogue import find_device
from tuner.engines.serving.releases import ENGINE_TRAITS
from tuner.goals.serve_plan import linked_sheet
from tuner.prices.serve.machine import ServingMachine
from tuner.prices.serve.network_collectives import network_collective_s
from tuner.spec.cluster import Pool

MEASURED_US = {
    # 2 x 8 A100, 8 HDR cards each (dstack, examples/clusters/crusoe): nccl-tests, in place.
    "a100-sxm": {16_384: 37, 65_536: 51, 131_072: 50, 524_288: 69, 1_048_576: 89, 16_777_216: 266},
    # 2 x 8 H100 with InfiniBand (github.com/drmysore/nebius-h100-16gpu-benchmark), 2 x 8 H20 with
    # NDR (github.com/NVIDIA/nccl/issues/1244).
    "h100-sxm": {512: 46, 1_048_576: 88, 10_485_760: 157},
}


def all_reduce_s(device: str, num_bytes: float, *, ranks: int = 16, **pool: object) -> float:
    own = Pool(name="p", device=device, nodes=4, devices_per_node=8).model_copy(update=pool)
    machine = ServingMachine(
        engines=ENGINE_TRAITS, sheet=linked_sheet(find_device(device), own), tables=None
    )
    op = collective("all_reduce", np.array([num_bytes]), ranks=ranks, software="vllm")
    return float(machine.seconds(op)[0])


def test_all_reduces_of_two_servers_take_what_was_measured() -> None:
    for device, rows in MEASURED_US.items():
        for num_bytes, measured_us in rows.items():
            priced_s = all_reduce_s(device, float(num_bytes))
            assert priced_s == pytest.approx(measured_us * 1e-6, rel=0.34), (device, num_bytes)


def test_nccls_own_figures_are_met_but_for_the_start() -> None:
    # What NCCL's tuner logs for 2 x 8 H100 (github.com/NVIDIA/nccl/issues/1453).
    for num_bytes, tuned_us in ((64, 25.2), (8192, 26.5), (65_536, 37.8), (131_072, 51.6)):
        nothing = np.zeros(1)
        sizes = np.array([float(num_bytes)])
        priced = network_collective_s(sizes, nothing, kind="all_reduce", domain=8, domains=2)
        assert (priced[0] - 15e-6) * 1e6 == pytest.approx(tuned_us, rel=0.05)


def test_a_network_costs_more_than_links_inside_and_more_servers_more_than_two() -> None:
    for num_bytes in (1e3, 14e3, 1e6, 1e8):
        times = [all_reduce_s("h100-sxm", num_bytes, ranks=ranks) for ranks in (8, 16, 32)]
        assert times == sorted(times)
        assert times[1] > 1.2 * times[0]


def test_the_card_and_the_domain_that_a_spec_states_count() -> None:
    large = 1e9
    slow = all_reduce_s("h100-sxm", large, nic=12.5e9)
    assert slow > 1.5 * all_reduce_s("h100-sxm", large)
    assert all_reduce_s("h100-sxm", large, oversubscription=4.0) == pytest.approx(slow)
    # Half servers: eight ranks are on two of them.
    assert all_reduce_s("h100-sxm", 14e3, ranks=8, devices_per_node=4) > 30e-6
    # A rack is one domain, whatever its trays.
    rack = find_device("gb200")
    own = Pool(name="p", device="gb200", nodes=18, devices_per_node=4)
    assert linked_sheet(rack, own).scale_up_domain == rack.scale_up_domain == 72
