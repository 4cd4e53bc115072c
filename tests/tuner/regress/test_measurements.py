import math
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profilers.records import Case, Machine, Measurement
from profilers.store import write_profile
from tests.profilers.testing import fake_machine, fake_profile
from tuner.regress.measurements import (
    MeasuredBefore,
    Summed,
    families,
    folder_sha256,
    other_hardware,
    other_software,
    student_p,
    sum_up,
)
from tuner.regress.profile_check import check_profile
from tuner.regress.records import ScenarioVerdict

SIZES = 12
PROFILE = Path(__file__).parents[3] / "examples/profiles/epyc-2-ranks/used/profile"


def measured(
    factor: float = 1.0,
    *,
    groups: Mapping[str, float] | None = None,
    noise: float = 0.02,
    machine: Machine | None = None,
) -> MeasuredBefore:
    """Two kinds of operation at 12 sizes, 5 repeats each; `groups` slows single kinds."""
    factors = {"collective/all_to_all": factor, "gemm/bf16/forward": 1.0, **(groups or {})}
    cases: dict[str, dict[str, Summed]] = {
        group: {f"m{size}": (5, math.log(size * slow), noise**2) for size in range(1, SIZES + 1)}
        for group, slow in factors.items()
    }
    return MeasuredBefore(sha256="a", machine=machine or fake_machine(world=2), groups=cases)


def test_a_link_that_is_a_tenth_slower_at_every_size_is_found() -> None:
    link, gemm = families(measured(), measured(1.1))
    assert (link.name, link.verdict) == ("collective all_to_all", ScenarioVerdict.REGRESSION)
    assert link.words == "collective all_to_all: 10 % slower over its 12 cases, significantly"
    assert gemm.verdict is ScenarioVerdict.PASS


def test_too_small_a_change_passes_however_significant() -> None:
    assert families(measured(), measured(1.04, noise=0.0))[0].verdict is ScenarioVerdict.PASS


def test_a_change_within_the_noise_passes_however_large() -> None:
    before, now = measured(noise=0.5), measured(noise=0.5)
    shifted = {f"m{size}": (5, math.log(size) + (-1) ** size * 0.3, 0.25) for size in range(1, 13)}
    now = now.model_copy(update={"groups": {**now.groups, "collective/all_to_all": shifted}})
    assert families(before, now)[0].verdict is ScenarioVerdict.PASS


def test_one_slow_size_is_found_among_many() -> None:
    now = measured()
    cases = dict(now.groups["collective/all_to_all"])
    cases["m3"] = (5, math.log(3 * 1.5), 0.0004)
    now = now.model_copy(update={"groups": {**now.groups, "collective/all_to_all": cases}})
    link = families(measured(), now)[0]
    assert link.words == "collective all_to_all: 1 of 12 cases significantly slower, 50 %"


def test_faster_is_better_and_what_is_not_measured_is_missing() -> None:
    assert families(measured(), measured(0.8))[0].verdict is ScenarioVerdict.BETTER
    now = measured()
    now = now.model_copy(update={"groups": {"gemm/bf16/forward": now.groups["gemm/bf16/forward"]}})
    gone = families(measured(), now)[0]
    assert (gone.verdict, gone.words) == (
        ScenarioVerdict.MISSING,
        "collective all_to_all: 12 cases are no longer measured",
    )


def test_what_is_only_measured_now_says_nothing() -> None:
    now = measured(groups={"copy/device": 1.0})
    assert [family.verdict for family in families(measured(), now)] == [ScenarioVerdict.PASS] * 2


def test_hardware_and_software_changes_are_distinguished() -> None:
    here = fake_machine(world=2)
    driver = here.model_copy(update={"driver": "550.54"})
    assert other_hardware(here, driver) == ""
    assert other_software(here, driver) == (f"driver {here.driver} -> 550.54",)
    less = here.model_copy(update={"memory_bytes_per_device": here.memory_bytes_per_device // 2})
    assert "memory_bytes_per_device" in other_hardware(here, less)
    assert other_hardware(here, here.model_copy(update={"device": "B200"})).startswith("device ")
    # A driver that keeps a hundredth of the memory for itself is no other machine.
    nearly = int(here.memory_bytes_per_device * 0.99)
    assert not other_hardware(here, here.model_copy(update={"memory_bytes_per_device": nearly}))


def test_student_s_p_value_is_the_table_s() -> None:
    # t = 2.776 at 4 degrees of freedom is the two-sided 5 % point: five values of mean 2.776 and
    # standard error 1, i.e. a variance of 5.
    spread = math.sqrt(5.0)
    values = [2.776 + spread * each for each in (-1.0, 1.0, -1.0, 1.0, 0.0)]
    assert student_p(values) == pytest.approx(0.05, abs=1e-4)
    assert student_p([1.0]) == 1.0
    assert student_p([0.0, 0.0]) == 1.0
    assert student_p([0.1, 0.1]) == 0.0


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(-1.0, 1.0), min_size=2, max_size=30))
def test_swapping_then_and_now_changes_no_p_value(logs: list[float]) -> None:
    assert student_p(logs) == pytest.approx(student_p([-each for each in logs]))
    assert 0.0 <= student_p(logs) <= 1.0


def test_the_stored_profile_equals_itself_and_is_hashed_by_content(tmp_path: Path) -> None:
    summed = sum_up(PROFILE)
    assert len(summed.cases) > 1500
    assert {family.verdict for family in families(summed, summed)} == {ScenarioVerdict.PASS}
    (tmp_path / "a").write_text("1")
    first = folder_sha256(tmp_path)
    (tmp_path / "a").write_text("2")
    assert folder_sha256(tmp_path) != first


def stored(folder: Path, factor: float, *, device: str = "gpu", repeats: int = 5) -> Path:
    cases = [Case(operation="copy", kind="device", axes={"bytes": 2**n}) for n in range(10, 20)]
    rows = [
        Measurement(
            case=case,
            times_s=tuple(
                factor * case.axes["bytes"] * 1e-9 * (1.0 + 0.01 * n) for n in range(repeats)
            ),
        )
        for case in cases
    ]
    write_profile(folder, fake_profile(rows, machine=fake_machine(device=device)))
    return folder


def test_profiles_are_compared_by_kind_of_operation(tmp_path: Path) -> None:
    old, new = stored(tmp_path / "old", 1.0), stored(tmp_path / "new", 1.1)
    (slow,) = check_profile(new, old)
    assert (slow.name, slow.verdict) == ("profile copy device", ScenarioVerdict.REGRESSION)
    assert "10 % slower" in slow.reason
    assert check_profile(old, old)[0].verdict is ScenarioVerdict.PASS
    assert check_profile(old, new)[0].verdict is ScenarioVerdict.BETTER


def test_profiles_of_other_machines_or_without_repeats_are_incomparable(tmp_path: Path) -> None:
    old, new = stored(tmp_path / "old", 1.0), stored(tmp_path / "new", 1.0, device="other")
    (other,) = check_profile(new, old)
    assert other.verdict is ScenarioVerdict.INCOMPARABLE
    assert "device 'gpu' -> 'other'" in other.reason
    (nothing,) = check_profile(old, stored(tmp_path / "single", 1.0, repeats=1))
    assert nothing.verdict is ScenarioVerdict.INCOMPARABLE
