"""A processor as its profile describes it."""

import pytest

from profilers.records import Case, Measurement, Profile
from tests.profilers.testing import fake_machine, fake_profile, gemm_case
from tuner.devices.datasheet import Generation, Vendor
from tuner.devices.measured import measured_sheet
from tuner.errors import SpecError


def profile(*rows: Measurement, world: int = 2, device_kind: str = "cpu") -> Profile:
    machine = fake_machine(world=world).model_copy(update={"device_kind": device_kind})
    return fake_profile(list(rows), machine=machine)


def timed(case: Case, time_s: float) -> Measurement:
    return Measurement(case=case, times_s=(time_s,))


def copied(num_bytes: int, time_s: float) -> Measurement:
    return timed(Case(operation="copy", kind="device", axes={"bytes": num_bytes}), time_s)


GEMMS = (
    timed(gemm_case(128, n=256, k=512, dtype="bf16"), 1e-3),
    timed(gemm_case(1024, n=256, k=512, dtype="bf16"), 2e-3),
    timed(gemm_case(1024, n=256, k=512, dtype="fp32"), 4e-3),
)


def test_rates_are_the_fastest_that_were_reached() -> None:
    axes = {"bytes": 2**20, "ranks": 2, "stride": 1, "world": 2}
    ring = timed(Case(operation="collective", kind="all_gather", axes=axes), 1e-3)
    sheet = measured_sheet(profile(*GEMMS, copied(10**6, 1e-3), copied(10**8, 2e-2), ring))
    assert sheet.flop_per_s == pytest.approx(
        {"bf16": 2 * 1024 * 256 * 512 / 2e-3, "fp32": 2 * 1024 * 256 * 512 / 4e-3}
    )
    assert sheet.memory_bytes_per_s == pytest.approx(2 * 10**8 / 2e-2)
    assert sheet.scale_up_bytes_per_s == pytest.approx(2**19 / 1e-3)
    assert (sheet.scale_up_domain, sheet.devices_per_node) == (2, 2)
    assert sheet.generation is Generation.PROCESSOR
    assert sheet.generation.vendor is Vendor.CPU


def test_one_rank_alone_reaches_its_peers_by_a_copy() -> None:
    sheet = measured_sheet(profile(*GEMMS, copied(10**8, 2e-2), world=1))
    assert sheet.scale_up_bytes_per_s == pytest.approx(10**8 / 2e-2)


def test_what_describes_no_processor_is_refused() -> None:
    for rows, device_kind, said in (
        (GEMMS, "cpu", "no copies within the device"),
        ((copied(10**8, 2e-2),), "cpu", "no GEMMs in bf16"),
        ((*GEMMS, copied(10**8, 2e-2)), "cuda", "only processors are described by a profile"),
    ):
        with pytest.raises(SpecError, match=said):
            measured_sheet(profile(*rows, device_kind=device_kind))
