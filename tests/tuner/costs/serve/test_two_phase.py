"""Exchanges between attention and expert devices against sums by hand."""

from dataclasses import replace

import numpy as np
import pytest

from tuner.costs.serve.two_phase import RoleDevices, Wire, two_phase_s

ROW = 1e4
"""Bytes of a token."""
SIDE = RoleDevices(devices=8, domain=8, inside_bytes_per_s=1e11, nic_bytes_per_s=1e10)


def seconds(
    tokens: float, *, attention: RoleDevices, experts: RoleDevices, wire: Wire | None = None
) -> float:
    found = two_phase_s(
        np.array([tokens]), row_bytes=ROW, attention=attention, experts=experts, wire=wire
    )
    return float(found[0])


def test_inside_one_domain_the_side_with_fewer_devices_binds() -> None:
    # 120 tokens are 1.2 MB: received in 1.2e6 / 0.6e11 = 20 us, sent by 2 to 6 in thrice that.
    few = seconds(120.0, attention=replace(SIDE, devices=2), experts=replace(SIDE, devices=6))
    even = seconds(120.0, attention=replace(SIDE, devices=4), experts=replace(SIDE, devices=4))
    assert even == pytest.approx(2.0 * (15e-6 + 20e-6))
    assert few == pytest.approx(2.0 * (15e-6 + 60e-6))


def test_between_domains_one_copy_goes_to_a_relay_of_each() -> None:
    # Phase 1: 7/8 of 1.2 MB at 0.6e11. Phase 2: 1.2 MB over 0.6 of 8e10; then 1.2 MB inside.
    gathered = 5e-6 + 1.05e6 / 0.6e11
    relayed = 15e-6 + 1.2e6 / 4.8e10 + 5e-6 + 1.2e6 / 0.6e11
    assert seconds(120.0, attention=SIDE, experts=SIDE) == pytest.approx(2.0 * (gathered + relayed))


def test_few_bytes_go_to_every_expert_device_directly() -> None:
    # 1 token: eight copies of 10 kB take 1.7 us, less than the latency of a relay.
    gathered = 5e-6 + 0.875e4 / 0.6e11
    direct = 15e-6 + 8e4 / 4.8e10
    assert seconds(1.0, attention=SIDE, experts=SIDE) == pytest.approx(2.0 * (gathered + direct))


def test_one_attention_device_has_nothing_to_gather() -> None:
    # A relay sends one copy over its card and 10 kB inside; its kernel takes less than 7 copies.
    one = replace(SIDE, devices=1)
    relayed = 15e-6 + 1e4 / 0.6e10 + 5e-6 + 1e4 / 0.6e11
    assert seconds(1.0, attention=one, experts=SIDE) == pytest.approx(2.0 * relayed)


def test_a_link_between_pools_brings_its_latency_and_bounds_all_copies() -> None:
    thin = Wire(bytes_per_s=1e9, latency_s=1e-3)
    one = replace(SIDE, devices=1)
    found = seconds(120.0, attention=one, experts=one, wire=thin)
    assert found == pytest.approx(2.0 * (1e-3 + 1.2e6 / 1e9))
    wide = Wire(bytes_per_s=1e15, latency_s=20e-6)
    assert seconds(120.0, attention=one, experts=one, wire=wide) == pytest.approx(
        2.0 * (20e-6 + 1.2e6 / 0.6e10)
    )


def test_expert_devices_in_more_domains_take_more_copies() -> None:
    times = [
        seconds(5000.0, attention=SIDE, experts=replace(SIDE, devices=devices))
        for devices in (8, 16, 32)
    ]
    assert times == sorted(times)
    assert times[0] < times[1]
