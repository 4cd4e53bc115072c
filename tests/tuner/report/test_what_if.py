from typing import Any

from tests.printed import flat
from tuner.plans.what_if import IDLE, Rival, WhatIf, WhatIfOutcome, Why
from tuner.report.content import Table
from tuner.report.terminal import Screen, blocks_text
from tuner.report.what_if import what_if_section, why_sections


def outcome(change: str, tokens_per_s: float | None = None, **more: Any) -> WhatIfOutcome:
    figures = {} if tokens_per_s is None else {"tokens_per_s": tokens_per_s}
    fields: dict[str, Any] = {
        "change": change,
        "says": change,
        "status": "feasible",
        "decision": "TP 1",
        "objective": "tokens_per_s",
        "figures": figures,
    }
    return WhatIfOutcome(**(fields | more))


def test_every_outcome_says_what_it_brings_and_what_changes() -> None:
    outcomes = (
        outcome("nodes=x2", 190.0, gain_ratio=0.9, decision_changes=("DP 2 -> 4",)),
        outcome("memory=+20%", 100.02, gain_ratio=0.0002),
        outcome("bandwidth=/2", 90.0, gain_ratio=-0.1, reason=f"more; {IDLE}"),
        outcome("batch=x2", 104.0),
        outcome("nodes=/2", status="refused", reason="3 nodes cannot be halved"),
        outcome("memory=-20%", status="infeasible", reason="memory_per_device"),
    )
    found = WhatIf(base=outcome("", 100.0), outcomes=outcomes, time_limit_s=60.0)
    (table,) = (one for one in what_if_section(found).blocks if isinstance(one, Table))
    assert [(row[1].text, row[3].text) for row in table.rows] == [
        ("feasible", ""),
        ("+90.0 % tokens/s", "DP 2 -> 4"),
        ("no change", ""),
        ("-10.0 % tokens/s", IDLE),
        ("fits", "TP 1"),
        ("not possible", "3 nodes cannot be halved"),
        ("nothing fits", "memory_per_device"),
    ]
    assert table.rows[1][2].text == "tokens/s 190"


def test_runners_up_are_told_apart_by_seconds() -> None:
    rival = Rival(
        decision="tp2", within_band=True, lost_by="", terms_s={"bubble": 0.5, "once": -0.25}
    )
    sections = why_sections(Why(rivals=(rival,), notes=("a note",)))
    assert (
        "tp2: +250 ms = pipeline bubble +500 ms, gradient reduction and optimizer -250 ms"
        in flat(blocks_text(sections, Screen(is_whole=True)))
    )
    assert [section.heading for section in sections][1] == "Notes on what-ifs"
    assert why_sections(Why(rivals=())) == ()
