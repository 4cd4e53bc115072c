"""Dispatch rules that a goal names: each plans; those of no engine tell what they would gain."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from profilers.routing.recording import Recording
from profilers.routing.store import write_recording
from solvers.placement.ranks import Placement
from tests.expect import present, refused
from tests.printed import words_of
from tuner.engines.place_writers import emit_placement
from tuner.errors import SpecError
from tuner.goals.place_plan import place
from tuner.goals.place_spec import read_place_spec
from tuner.plans.place import PlacePlan, VerifiedPlacement
from tuner.report.place_page import place_report
from tuner.search.place.cost import evaluate_workload
from tuner.search.place.dispatch_choice import compared_dispatches
from tuner.search.place.plan_place import state_problem
from tuner.search.settings import SearchSettings
from tuner.spec.place import Dispatch

MODELS = Path(__file__).parents[4] / "examples" / "models"

MACHINE = f"""\
model: {MODELS / "mixtral-8x7b" / "config.json"}
cluster:
  pools: [{{name: h100, device: h100-sxm, nodes: 1, devices_per_node: 8}}]
"""


def store(folder: Path, count_PLE: np.ndarray) -> None:
    """Write the recording of the only workload."""
    write_recording(
        folder / "chat",
        Recording(
            model="tiny",
            workload="chat",
            layer_ids=(0, 1, 2, 3),
            top_k=2,
            count_PLE=count_PLE.astype(np.int64),
        ),
    )


def planned(
    folder: Path, goal: str, *, priced: bool, slots: int, emit: str = "[]", skew: float = 0.8
) -> PlacePlan:
    rng = np.random.default_rng(11)
    share_LE = np.exp(skew * rng.standard_normal((4, 8)))
    share_LE /= share_LE.sum(axis=1, keepdims=True)
    store(folder, np.stack([rng.multinomial(40_000, share_LE) for _ in range(4)]))
    path = folder / "spec.yaml"
    path.write_text(
        f"schema_version: 1\n{MACHINE if priced else ''}goal:\n  kind: place\n"
        f"  workloads: [{{name: chat, path: chat}}]\n  ranks: 4\n  slots_per_rank: {slots}\n"
        f"{goal}emit: {emit}\n"
    )
    return place(path, time_limit_s=1.0).plan


def test_sglang_is_written_for_without_a_model_where_all_layers_were_recorded(
    tmp_path: Path,
) -> None:
    plan = planned(tmp_path, "", priced=False, slots=3, emit="[sglang]")
    verified = VerifiedPlacement(plan=plan, decision=present(plan.decision), waived="a test")
    file = next(one for one in emit_placement("sglang", verified) if one.path.suffix == ".json")
    rows = json.loads(file.text)["physical_to_logical_map"]
    assert rows == [list(row) for row in present(plan.decision).physical_to_logical]
    assert any("taken for all decoder layers" in note for note in plan.provenance.notes)


@pytest.mark.slow
def test_every_dispatch_rule_plans_and_is_certified(tmp_path: Path) -> None:
    for rule in Dispatch:
        goal = f"  dispatch: {rule.value}\n"
        slots = 2 if rule is Dispatch.LEAST_LOADED else 3
        plan = planned(tmp_path, goal, priced=False, slots=slots, emit="[eplb]")
        proven = plan.certificate
        assert proven.objective is not None, (rule.value, proven)
        assert proven.bound is not None, (rule.value, proven)
        assert proven.bound <= proven.objective, (rule.value, proven)
        notes = plan.provenance.notes
        assert len([note for note in notes if f"rule {rule.value!r}" in note]) == 1, (
            rule.value,
            notes,
        )


def test_weights_that_least_loaded_sends_are_counted_in_seconds(tmp_path: Path) -> None:
    goal = "  objective: layer_time\n  tokens_per_pass: 20000\n  dispatch: least_loaded\n"
    plan = planned(tmp_path, goal, priced=True, slots=2, skew=1.2)
    taken, without = present(plan.predicted).dispatches
    assert (taken.rule, without.rule) == ("least_loaded", "dynamic")
    assert "no engine that is written for has the rule" in taken.words
    assert taken.words in words_of(place_report(plan))
    (planned_times,) = present(plan.predicted).layer_times
    assert taken.layer_time_s == pytest.approx(planned_times.after_s)
    (note,) = (note for note in plan.provenance.notes if note.startswith("the most-loaded rank"))
    assert note.endswith(
        "their transfer is counted, after the all-to-all and not overlapped with it"
    )
    experts = float(re.findall(r"(\d+\.\d+) experts", note)[0])
    assert experts > 0.5
    # 352 MB of an expert of Mixtral in bf16 over NVLink's 450 GB/s, in each of 4 layers.
    (times,) = present(present(plan.predicted)).layer_times
    assert times.exchange_after_s > 4 * experts * 352e6 / 450e9
    plan = planned(tmp_path, "  dispatch: least_loaded\n", priced=False, slots=2, skew=1.2)
    (note,) = (note for note in plan.provenance.notes if note.startswith("the most-loaded rank"))
    assert note.endswith("their transfer is not counted; name `model` and `cluster` for it")
    assert plan.certificate.bound == 1.0


def test_both_rules_are_scored_on_the_same_passes(tmp_path: Path) -> None:
    planned(tmp_path, "  dispatch: least_loaded\n", priced=False, slots=2)
    # The experts with most load change from pass to pass: the mean pass is nearly even.
    rng = np.random.default_rng(5)
    share_PLE = rng.dirichlet(np.full(8, 2.0), size=(32, 4))
    count_PLE = np.array([[rng.multinomial(40_000, row) for row in rows] for rows in share_PLE])
    store(tmp_path, count_PLE)
    problem = state_problem(read_place_spec(tmp_path / "spec.yaml"), settings=SearchSettings())
    (one,) = problem.evidence
    in_order = Placement(expert_LS=np.tile(np.arange(8), (4, 1)))
    with_rule, without = (
        evaluate_workload(problem, one, in_order, dispatch=rule).loads
        for rule in ("least_loaded", "dynamic")
    )
    taken, other = compared_dispatches(problem, in_order)
    # Every pass is split no worse by the rule, so it cannot lose.
    assert (with_rule.imbalance_P <= without.imbalance_P + 1e-9).all()
    assert taken.imbalance == pytest.approx(with_rule.imbalance)
    assert other.imbalance == pytest.approx(without.imbalance)
    assert taken.imbalance < 0.9 * other.imbalance
    assert taken.layer_time_s is None


def test_where_layers_are_priced_both_rules_are_compared_in_seconds(tmp_path: Path) -> None:
    plan = planned(tmp_path, "  dispatch: least_loaded\n", priced=True, slots=2, skew=1.2)
    taken, without = present(plan.predicted).dispatches
    (times,) = present(plan.predicted).layer_times
    assert taken.layer_time_s == pytest.approx(times.after_s)
    assert without.layer_time_s is not None
    (note,) = (note for note in plan.provenance.notes if note.startswith("the most-loaded rank"))
    assert "their transfer is counted" in note


def test_rules_of_no_engine_are_refused_in_one_line(tmp_path: Path) -> None:
    least = "  dispatch: least_loaded\n"
    for goal, slots, emit, expected in (
        (least, 2, "[sglang]", "least_loaded is in no release of sglang; set emit: []"),
        (least, 3, "[]", "12 slots hold 8 experts; set redundant_experts to 0"),
        (f"{least}  rank_speeds: [1, 1, 1, 2]\n", 2, "[]", "assumes equal ranks"),
        (f"{least}  objective: layer_chain\n", 2, "[]", "which objective layer_chain minimises"),
        ("  dispatch: activated\n", 3, "[]", "'activated' is read no more"),
    ):
        with refused(SpecError, expected):
            planned(tmp_path, goal, priced=False, slots=slots, emit=emit)
