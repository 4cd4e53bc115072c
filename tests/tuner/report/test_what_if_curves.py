from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.rows import each_row
from tuner.goals.registry import goal_of_folder
from tuner.plans.what_if import WhatIf, WhatIfOutcome, parse_changes
from tuner.report.content import Figure, Section
from tuner.report.what_if_curves import train_curve_figure, what_if_section


def outcome(change: str, tokens_per_s: float | None, **more: Any) -> WhatIfOutcome:
    fields: dict[str, Any] = {
        "change": change,
        "says": change,
        "status": "feasible",
        "decision": "TP 1",
        "objective": "tokens_per_s",
    }
    if tokens_per_s is not None:
        fields["figures"] = {
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_per_device": tokens_per_s / 8.0,
        }
    return WhatIfOutcome(**(fields | more))


def requests_of(folder: Path) -> tuple[str, ...]:
    goal = goal_of_folder(folder)
    return goal.curves(goal.read(folder))


def drawn(text: str, *outcomes: WhatIfOutcome, **options: Any) -> Section:
    found = WhatIf(base=outcome("", 100.0), outcomes=outcomes, time_limit_s=60.0)
    return what_if_section(found, parse_changes(text), **({"drawn": train_curve_figure} | options))


def figures(section: Section) -> dict[str, Figure]:
    return {block.name: block for block in section.blocks if isinstance(block, Figure)}


def test_a_curve_goes_through_every_solution_in_order_of_the_factor() -> None:
    section = drawn("nodes=x2,nodes=/2", outcome("nodes=x2", 190.0), outcome("nodes=/2", 51.0))
    own = figures(section)["what-if-nodes"]
    line = own.traces[-1]
    assert line["x"] == [0.5, 1.0, 2.0]
    assert line["y"] == [51.0, 100.0, 190.0]
    proportion = own.traces[0]
    assert proportion["y"] == [50.0, 100.0, 200.0]


def test_what_changes_the_work_is_drawn_per_device() -> None:
    section = drawn("batch=x2", outcome("batch=x2", 104.0))
    assert figures(section)["what-if-batch"].traces[-1]["y"] == [12.5, 13.0]


def test_a_share_is_a_factor_and_proof_fills_the_point() -> None:
    section = drawn("memory=-20%", outcome("memory=-20%", 90.0, status="optimal"))
    line = figures(section)["what-if-memory"].traces[-1]
    assert line["x"] == pytest.approx([0.8, 1.0])
    assert line["marker"]["symbol"] == ["circle", "circle-open"]


def test_slots_are_added_to_those_of_a_rank() -> None:
    base = outcome("", None, objective="objective", figures={"objective": 1.2})
    found = WhatIf(
        base=base,
        outcomes=(base.model_copy(update={"figures": {"objective": 1.1}}),),
        time_limit_s=9.0,
    )
    section = what_if_section(found, parse_changes("slots=+1"), drawn=lambda _, one: one, slots=4)
    assert figures(section)["what-if-slots"].traces[-1]["x"] == [1.0, 1.25]


def test_an_infeasible_change_says_why() -> None:
    refused = outcome("nodes=/2", None, status="refused", reason="3 nodes cannot be halved")
    section = drawn("nodes=x2,nodes=/2", outcome("nodes=x2", 190.0), refused)
    own = figures(section)["what-if-nodes"]
    assert "No solution at factor 0.5: 3 nodes cannot be halved" in own.reading
    assert own.traces[-1]["x"] == [1.0, 2.0]


def test_a_limit_without_any_solution_has_no_curve_but_a_row() -> None:
    refused = outcome("nodes=/2", None, status="refused", reason="3 nodes cannot be halved")
    section = drawn("nodes=/2", refused)
    assert not figures(section)
    (table,) = [block for block in section.blocks if type(block).__name__ == "Table"]
    assert "3 nodes cannot be halved" in str(table)


@pytest.mark.slow
@each_row("kind", ["verified", "train", "serve", "place"])
def test_what_if_requests_parse_and_match_the_plan(shown: Callable[[str], Any], kind: str) -> None:
    requests = requests_of(shown(kind).folder)
    assert len(set(requests)) == len(requests) >= 3
    assert len(parse_changes(",".join(requests))) == len(requests)


def test_what_if_requests_of_a_deployment_match_its_traffic_and_slo(serve_folder: Path) -> None:
    keys = {request.split("=")[0] for request in requests_of(serve_folder)}
    assert keys == {"rate", "tpot", "ttft", "nodes", "bandwidth"}
