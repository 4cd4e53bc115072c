"""What `moetune profile --for` measures, for specs of every goal."""

import json
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from profilers.records import Case, Measurement
from profilers.store import write_profile
from tests.expect import present
from tests.profilers.testing import fake_machine, fake_profile
from tuner import api
from tuner.goals.train_spec import read_spec
from tuner.prices.lookups import WantedSizes

EXAMPLES = Path(__file__).parents[3] / "examples"
CHECKS = EXAMPLES / "checks"


@cache
def wanted_by(check: str) -> WantedSizes:
    return api.wanted_sizes(CHECKS / check / "spec.yaml")


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
    wanted = wanted_by(check)
    assert operations <= {case.operation for case in wanted.cases}
    assert set(unmeasured) <= set(wanted.unmeasured)
    assert len({case.id for case in wanted.cases}) == len(wanted.cases)


def test_experts_are_those_that_a_device_holds() -> None:
    # 128 experts on 16 devices: 8 on each at least. Bounds with one expert are no lookups.
    cases = api.wanted_sizes(CHECKS / "train-qwen3" / "spec.yaml").cases
    assert min(case.axes["experts"] for case in cases if case.operation == "grouped_gemm") == 8


def test_lengths_follow_the_prompts_of_the_traffic() -> None:
    cases = api.wanted_sizes(CHECKS / "serve-aggregated" / "spec.yaml").cases
    rows = sorted(
        case.axes["m"] for case in cases if (case.axes.get("n"), case.axes.get("k")) == (128, 2048)
    )
    assert rows[0] == 1
    assert max(later / earlier for earlier, later in pairwise(rows)) < 4.0


def placement(tmp_path: Path, **goal: str) -> Path:
    keys = yaml.safe_load((EXAMPLES / "placement" / "balance.yaml").read_text())
    (workload, *_) = keys["goal"]["workloads"]
    path = str(EXAMPLES / "placement" / workload["path"])
    keys["goal"] |= {"workloads": [workload | {"path": path}], **goal}
    keys["model"] = str(tmp_path / "config.json")
    model = json.loads((EXAMPLES / "models" / "qwen3-30b-a3b" / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(model | {"num_experts": 32, "num_experts_per_tok": 4})
    )
    pool = {"name": "p", "device": "h100-sxm", "nodes": 2, "devices_per_node": 4}
    keys["cluster"] = {"pools": [pool]}
    spec = tmp_path / "spec.yaml"
    spec.write_text(yaml.safe_dump(keys))
    return spec


def test_a_placement_looks_up_the_type_of_its_weights(tmp_path: Path) -> None:
    wanted = api.wanted_sizes(placement(tmp_path))
    assert {case.operation for case in wanted.cases} >= {"gemm", "grouped_gemm"}
    fp8 = api.wanted_sizes(placement(tmp_path, quantization="fp8"))
    assert {"gemm fp8", "grouped_gemm fp8"} <= set(fp8.unmeasured)
    assert "grouped_gemm" not in {case.operation for case in fp8.cases}


def test_what_prices_nothing_looks_up_nothing() -> None:
    assert api.wanted_sizes(EXAMPLES / "placement" / "balance.yaml") == WantedSizes(cases=())


def test_a_profile_of_the_listed_sizes_prices_the_plan(
    tmp_path: Path, formula_s: Callable[[Case], float]
) -> None:
    listed = wanted_by("train-mixtral").cases
    rows = [
        Measurement(case=case.model_copy(update={"direction": each}), times_s=(formula_s(case),))
        for case in listed
        for each in ("forward", "backward")
    ]
    spec = CHECKS / "train-mixtral" / "spec.yaml"
    (pool,) = read_spec(spec).cluster.pools
    machine = fake_machine(device=present(pool.device)).model_copy(update={"device_kind": "cuda"})
    write_profile(tmp_path / "profile", fake_profile(rows, machine=machine))
    provenance = api.plan(
        spec, profiles=tmp_path / "profile", with_unlaunchable=False
    ).plan.provenance
    lacking = [note for note in provenance.notes if "the profile lacks" in note]
    assert not any(operation in note for note in lacking for operation in ("gemm", "attention"))
    assert not any(name.startswith("gemm") for name in provenance.extrapolated)
