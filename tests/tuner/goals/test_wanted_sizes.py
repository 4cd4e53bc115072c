"""What `moetune profile --for` measures, for specs of every goal."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from profilers.records import Case, Measurement
from profilers.store import write_profile
from tests.profilers.testing import fake_machine, fake_profile
from tuner import api

CHECKS = Path(__file__).parents[3] / "examples" / "checks"


@pytest.mark.parametrize(
    ("check", "operations", "unmeasured"),
    [
        ("train-mixtral", {"gemm", "grouped_gemm", "attention", "memory_bound"}, ()),
        ("train-measured", {"gemm", "collective", "optimizer", "copy"}, ()),
        ("serve-disaggregated", {"gemm"}, ("latent_decode bf16", "moe fp8_block")),
    ],
)
def test_every_stack_says_what_it_looks_up(
    check: str, operations: set[str], unmeasured: tuple[str, ...]
) -> None:
    wanted = api.wanted_sizes(CHECKS / check / "spec.yaml")
    assert operations <= {case.operation for case in wanted.cases}
    assert set(unmeasured) <= set(wanted.unmeasured)
    assert len({case.id for case in wanted.cases}) == len(wanted.cases)


def test_a_profile_of_the_listed_sizes_prices_the_plan(
    tmp_path: Path, formula_s: Callable[[Case], float]
) -> None:
    spec = tmp_path / "spec.yaml"
    keys = yaml.safe_load((CHECKS / "train-mixtral" / "spec.yaml").read_text())
    keys["model"] = str(CHECKS / "train-mixtral" / keys["model"])
    spec.write_text(yaml.safe_dump(keys))
    listed = api.wanted_sizes(spec).cases
    rows = [
        Measurement(case=case.model_copy(update={"direction": each}), times_s=(formula_s(case),))
        for case in listed
        for each in ("forward", "backward")
    ]
    (pool,) = keys["cluster"]["pools"]
    machine = fake_machine(device=pool["device"]).model_copy(update={"device_kind": "cuda"})
    write_profile(tmp_path / "profile", fake_profile(rows, machine=machine))
    provenance = api.plan(
        spec, profiles=tmp_path / "profile", with_unlaunchable=False
    ).plan.provenance
    lacking = [note for note in provenance.notes if "the profile lacks" in note]
    assert not any(operation in note for note in lacking for operation in ("gemm", "attention"))
    assert not any(name.startswith("gemm") for name in provenance.extrapolated)
