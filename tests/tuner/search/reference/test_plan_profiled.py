import math
import re
from collections.abc import Callable
from typing import Any

import pytest

from solvers.layout import exact
from solvers.layout.problem import Layout
from solvers.result import Claim, Status
from tests.expect import present
from tuner.plans.proof import certificate_line
from tuner.plans.train import Plan
from tuner.units import format_ratio

MakeCase = Callable[..., Any]

PLAIN: dict[str, Any] = {
    "search": {
        "micro_batch_size": [2],
        "zero_stage": [0, 1],
        "chunks": [1, 4],
        "virtual_pipeline_model_parallel_size": [1],
    }
}


def _with_memory(make_case: MakeCase, memory_bytes: int, **changes: Any) -> Plan:
    case = make_case(machine={"memory_limit_bytes": memory_bytes}, **(PLAIN | changes))
    plan: Plan = case.plan()
    return plan


def test_ample_memory_does_not_bind(make_case: MakeCase) -> None:
    plan = _with_memory(make_case, 2**40)
    assert plan.certificate.status == "optimal"
    assert plan.binding_constraint.endswith("memory does not bind")
    assert present(plan.predicted).step_time_s == pytest.approx(plan.certificate.objective)
    assert plan.relaxations == ()
    # The named cause is the largest of the breakdown.
    cause = max(present(plan.predicted).breakdown_s.items(), key=lambda item: item[1])[0]
    assert plan.binding_constraint.startswith(f"{cause}:")


def test_too_little_memory_names_the_least_that_suffices_which_then_binds(
    make_case: MakeCase,
) -> None:
    plan = _with_memory(make_case, 500_000)
    assert plan.certificate.status == "infeasible"
    assert plan.decision is None
    assert plan.binding_constraint == "memory_per_device"
    *_, relaxation = plan.relaxations
    assert relaxation.limit == "memory_per_device"
    needed = int(present(re.search(r"\((\d+) B\) usable instead", relaxation.change))[1])
    assert max(present(relaxation.predicted).peak_memory_bytes) <= needed
    enough = _with_memory(make_case, needed)
    assert enough.certificate.status == "optimal"
    assert enough.decision == present(relaxation.decision)
    assert _with_memory(make_case, needed - 1).certificate.status == "infeasible"
    # It costs time, and is therefore what binds.
    ample_s = present(_with_memory(make_case, 2**40).certificate.objective)
    assert present(enough.certificate.objective) > ample_s
    assert enough.binding_constraint.startswith("memory_per_device: with unlimited memory")
    gain = 1.0 - ample_s / present(enough.certificate.objective)
    assert f"{format_ratio(gain)} less" in enough.binding_constraint


def test_more_nodes_are_offered_before_more_memory_with_the_links_that_were_not_measured(
    make_case: MakeCase,
) -> None:
    usable = present(_with_memory(make_case, 500_000).relaxations[-1].predicted)
    limit_bytes = int(0.8 * max(usable.peak_memory_bytes))
    changes = []
    for measured_ranks, measured_nodes in ((2, 1), (512, 64)):
        machine = {
            "memory_limit_bytes": limit_bytes,
            "measured_ranks": measured_ranks,
            "measured_nodes": measured_nodes,
        }
        plan = make_case(machine=machine, **PLAIN).plan()
        assert plan.decision is None
        more, memory = plan.relaxations
        assert (more.limit, memory.limit) == ("nodes", "memory_per_device")
        assert plan.binding_constraint == "memory_per_device"
        assert max(present(more.predicted).peak_memory_bytes) <= limit_bytes
        changes.append(more.change)
    offer, ranks, nodes = changes[0].split("; ")
    stated = present(re.fullmatch(r"(\d+) nodes instead of 1: (\d+) devices", offer))
    assert ranks == (
        f"collectives were measured over 2 ranks, the plan uses up to {stated[2]}: larger groups "
        "are extrapolated"
    )
    assert nodes == (
        f"the profile covers 1 node, the plan uses up to {stated[1]}: links between nodes are "
        "priced like those inside one"
    )
    stated = present(re.fullmatch(r"(\d+) nodes instead of 1: (\d+) devices", changes[1]))
    assert int(stated[1]) > 1
    assert present(more.decision).num_devices == int(stated[2])


def test_ties_are_listed_as_ties_and_others_say_why_they_lost(make_case: MakeCase) -> None:
    plan = make_case(machine={"band_ratio": 0.05}, settings={"top": 6}, **PLAIN).plan()
    within = [one for one in plan.runners_up if one.within_band]
    assert len(within) == plan.certificate.within_band > 0
    edge = present(plan.predicted).step_time_s_band[1]
    for one in plan.runners_up:
        assert one.within_band == (one.predicted.step_time_s <= edge)
        assert one.predicted.step_time_s >= present(plan.predicted).step_time_s
        assert one.lost_by
    assert len(plan.runners_up) >= 5


def test_a_search_without_verdict_has_no_plan_and_no_made_up_reason(
    make_case: MakeCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsolved: Claim[Layout] = Claim(status=Status.UNKNOWN, solution=None, bound=-math.inf)
    monkeypatch.setattr(exact, "solve", lambda problem, **_: unsolved)
    limits = {"pipeline_model_parallel_size": [2], "virtual_pipeline_model_parallel_size": [2]}
    plan = make_case(search=limits).plan()
    assert plan.certificate.status == "unknown"
    assert plan.decision is None
    space = plan.certificate.space
    assert space.open > 0
    assert plan.binding_constraint.startswith(
        f"whether anything fits is not known: {space.open} combinations were neither solved nor "
        "ruled out (method exact, time limit "
    )
    assert "plan again with a longer --time-limit" in plan.binding_constraint
    assert plan.relaxations == ()
    assert f"{space.open} neither solved nor ruled out" in certificate_line(plan.certificate)
    assert certificate_line(plan.certificate).startswith("unknown: nothing was found")


def test_a_space_without_legal_combinations_names_the_commonest_rules(make_case: MakeCase) -> None:
    plan = make_case(search={"context_parallel_size": [2]}).plan()
    assert plan.certificate.status == "infeasible"
    assert 0 < len(plan.relaxations) <= 3
    assert plan.relaxations[0].limit == "search.context_parallel_size leaves it out"
    assert plan.relaxations[0].change.startswith("this rule alone excludes")
    assert all(one.limit in plan.binding_constraint for one in plan.relaxations)


def test_what_a_target_lacks_is_priced_by_searching_with_it(make_case: MakeCase) -> None:
    # Two stages share a budget that lets one of them keep more than the other, or not.
    limits = {"search": PLAIN["search"] | {"pipeline_model_parallel_size": [2]}}
    gains = []
    for memory in (10_600_000, 10_800_000, 11_300_000, 12_000_000):
        plan = _with_memory(make_case, memory, **limits, emit=["megatron-lm"])
        free = _with_memory(make_case, memory, **limits)
        assert (
            len(
                set(
                    zip(
                        present(plan.decision).stage_recompute,
                        present(plan.decision).chunks,
                        strict=True,
                    )
                )
            )
            == 1
        )
        gain = 1.0 - present(free.certificate.objective) / present(plan.certificate.objective)
        named = [one for one in plan.unlaunchable if "each stage" in one.feature]
        assert bool(named) == (gain > 5e-3)
        for one in named:
            assert one.target == "megatron-lm"
            assert one.gain_ratio == pytest.approx(gain)
        gains.append(gain)
    assert min(gains) == pytest.approx(0.0)
    assert max(gains) > 0.01


def test_the_reference_step_lacks_nothing_that_is_priced(make_case: MakeCase) -> None:
    assert _with_memory(make_case, 2**40).unlaunchable == ()


def test_two_runs_make_the_same_plan(make_case: MakeCase) -> None:
    texts = []
    for _ in range(2):
        plan = make_case(machine={"memory_limit_bytes": 9_000_000}).plan()
        same = plan.certificate.model_copy(update={"solve_s": 0.0})
        texts.append(plan.model_copy(update={"certificate": same}).model_dump_json())
    assert texts[0] == texts[1]


def test_a_plan_survives_being_stored(make_case: MakeCase) -> None:
    plan = _with_memory(make_case, 2**40)
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
