"""What says nothing, or says true where a number belongs, is refused and not taken for 1."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tuner.errors import PlanUnreadableError, SpecError
from tuner.goals.serve_spec import read_serve_spec
from tuner.goals.train_folder import read_plan
from tuner.goals.train_spec import read_spec
from tuner.plans.folder import PLAN_NAME

SERVING = Path(__file__).parents[3] / "examples" / "serving" / "mixed-pool.yaml"


def _changed(values: Any, path: tuple[Any, ...], value: Any) -> Any:
    changed = json.loads(json.dumps(values))
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


def test_an_empty_target_is_refused(tmp_path: Path) -> None:
    spec = yaml.safe_load(SERVING.read_text())
    spec["model"] = str((SERVING.parent / spec["model"]).resolve())
    file = tmp_path / "spec.yaml"
    for value in ({}, {"p90": None}):
        file.write_text(yaml.safe_dump(_changed(spec, ("goal", "slo", "ttft"), value)))
        with pytest.raises(SpecError, match=r"goal\.slo\.ttft: no target in it; write one like"):
            read_serve_spec(file)
    file.write_text(yaml.safe_dump(_changed(spec, ("goal", "slo"), {"tpot": {"p90": "40ms"}})))
    assert read_serve_spec(file).goal.slo.ttft.p90 is None


def test_true_is_no_number_in_a_spec(tiny_spec: Callable[..., Path]) -> None:
    file = tiny_spec()
    spec = yaml.safe_load(file.read_text())
    for path in (
        ("schema_version",),
        ("cluster", "pools", 0, "nodes"),
        ("cluster", "pools", 0, "price_per_device_hour"),
        ("cluster", "pools", 0, "usable_memory_ratio"),
        ("goal", "global_batch_size"),
        ("search", "micro_batch_size"),
    ):
        for value in (True, [True]) if path[-1] == "micro_batch_size" else (True,):
            file.write_text(yaml.safe_dump(_changed(spec, path, value)))
            with pytest.raises(SpecError, match=r"true is not a number|where a"):
                read_spec(file)
    file.write_text(yaml.safe_dump(spec))
    read_spec(file)


def test_a_stored_plan_holds_numbers_within_their_range(planned: Path) -> None:
    file = planned / PLAN_NAME
    plan = json.loads(file.read_text())
    degrees = [name for name in plan["decision"] if name.endswith("_parallel_size")]
    assert len(degrees) == 8
    wrong: list[tuple[tuple[str, ...], Any]] = [
        (("decision", name), value) for name in degrees for value in (0, -1, 10**30, True, "1", 3)
    ]
    wrong += [(("schema_version",), True), (("schema_version",), 1.5)]
    wrong += [(("goal", "global_batch_size"), value) for value in (0, -8, 10**30, True)]
    wrong += [(("decision", "micro_batch_size"), value) for value in (0, 10**30, True)]
    read = []
    for path, value in wrong:
        file.write_text(json.dumps(_changed(plan, path, value)))
        try:
            read_plan(planned)
            read.append((path, value))
        except PlanUnreadableError:
            continue
    assert read == []


def test_a_decision_for_more_devices_than_there_are_is_refused(planned: Path) -> None:
    file = planned / PLAN_NAME
    plan = json.loads(file.read_text())
    for name in ("data_parallel_size", "expert_data_parallel_size"):
        plan["decision"][name] *= 4
    file.write_text(json.dumps(plan))
    with pytest.raises(PlanUnreadableError, match=r"decision asks for 8 devices of 2"):
        read_plan(planned)
