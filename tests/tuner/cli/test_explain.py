"""`moetune explain` as it is typed."""

import json
import re
from pathlib import Path

import pytest

from profilers.steps.config import Recompute
from tests.expect import contains, present
from tests.printed import flat
from tests.rows import each_row
from tests.tuner.cli.refusals import Captured, output, refusal
from tuner.cli.plan_text import explanation
from tuner.goals.train_folder import read_plan
from tuner.plans.breakdown import cause_words
from tuner.plans.folder import PLAN_NAME
from tuner.units import format_bytes

MEMORY_COLUMNS = ["weights", "gradients", "optimizer", "activations", "buffers", "total"]


def test_it_breaks_time_and_memory_down_by_stage_and_says_why_others_lost(
    bound_plan: Path, capsys: Captured
) -> None:
    lines = output(capsys, ["explain", bound_plan, "--what-if", "none"])
    text = flat(lines)
    plan = read_plan(bound_plan)
    for cause in present(plan.predicted).breakdown_s:
        assert f"\n  {cause_words(cause)}" in lines
    contains(
        text,
        "Certificate: proven optimal under the model",
        f"Bound by {plan.binding_constraint}.",
        " stages layers recompute forward backward ",
    )
    assert " ".join(MEMORY_COLUMNS) in text
    for peak in present(plan.predicted).peak_memory_bytes:
        assert format_bytes(peak) in text
    for other in plan.alternatives[:3]:
        assert other.lost_by.split(";")[0].split()[0] in text
    ties = plan.certificate.within_band
    assert f"ties {ties} other parallel layouts are within the error band" in text


def test_a_stage_is_listed_with_its_own_option_where_stages_differ(bound_plan: Path) -> None:
    plan = read_plan(bound_plan)
    other = next(one for one in plan.alternatives if one.decision.pipeline_model_parallel_size == 2)
    levels = (Recompute.NONE, Recompute.FULL)
    uneven = {"recompute": Recompute.FULL, "stage_recompute": levels, "chunks": (1, 4)}
    decision = other.decision.model_copy(update=uneven)
    text = explanation(plan.model_copy(update={"decision": decision, "predicted": other.predicted}))
    for row in (r"\n  0 +2  none +\d", r"\n  1 +2  full, 4 chunks +\d"):
        assert re.search(row, text), text


def test_json_is_the_stored_plan_and_why(bound_plan: Path, capsys: Captured) -> None:
    printed = json.loads(output(capsys, ["explain", bound_plan, "--json", "--what-if", "none"]))
    why = printed.pop("why")
    assert printed == json.loads((bound_plan / PLAN_NAME).read_text())
    assert why["what_if"] is None
    assert len(why["rivals"]) == min(5, len(printed["alternatives"]))


def test_what_would_change_it_is_solved_anew(bound_plan: Path, capsys: Captured) -> None:
    text = flat(
        output(capsys, ["explain", bound_plan, "--what-if", "memory=x4,memory=-20%,rate=x2"])
    )
    assert "what-if: 3 cases solved again" in text
    assert re.search(r" \+[0-9.]+ % tokens/s ", text)
    assert "rate is no part of this goal" in text


@each_row(
    ("requested", "said"),
    [
        ("nodes", "is no change; write one like"),
        ("colour=+1", "'colour' cannot be changed; what can: nodes, memory"),
        (",".join(f"nodes=+{n}" for n in range(1, 40)), "39 changes; at most 32"),
    ],
)
def test_an_unreadable_change_is_one_line(
    bound_plan: Path, capsys: Captured, requested: str, said: str
) -> None:
    assert said in refusal(capsys, ["explain", bound_plan, "--what-if", requested])


@each_row("name", ["missing", "damaged"])
def test_no_readable_plan_is_one_line(planned: Path, capsys: Captured, name: str) -> None:
    if name == "damaged":
        (planned / PLAN_NAME).write_text('{"schema_version": 1')
    folder = planned if name == "damaged" else planned / "nowhere"
    assert PLAN_NAME in refusal(capsys, ["explain", folder])


def test_it_says_what_the_trials_said_once_there_are_any(capsys: Captured, tmp_path: Path) -> None:
    stored = Path(__file__).parents[3] / "examples/profiles/epyc-2-ranks"
    text = output(capsys, ["explain", stored, "--what-if", "none"])
    assert "\nwinner         tp1 pp2x2 " in text
    # 4 layers x (8 experts x 3 x 256 x 512 + 196,608 + 2,048 + 512) + 2 x 65,536 + 256
    assert "\nmodel          tiny-moe, 13.5M parameters, " in text
    for name in (PLAN_NAME, "verified.json"):
        (tmp_path / name).write_bytes((stored / name).read_bytes()[:2000])
    (tmp_path / PLAN_NAME).write_bytes((stored / PLAN_NAME).read_bytes())
    assert "verified.json" in refusal(capsys, ["explain", tmp_path, "--what-if", "none"])


def test_a_plan_is_named_by_its_folder_or_by_its_file(
    planned: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(planned)
    names = (planned, planned / "plan.json", "plan.json", ".")
    assert len({output(capsys, ["explain", name, "--what-if", "none"]) for name in names}) == 1
    shown = output(capsys, ["report", planned / "plan.json", "--no-what-if", "--format", "md"])
    assert shown == f"written: {planned / 'report.md'}\n"
