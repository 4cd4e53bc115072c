"""Running out of memory is the first thing that a page and a text say, where it is likely."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.expect import present
from tests.printed import flat
from tests.rows import each_row
from tuner.cli.plan_text import explanation, plan_text
from tuner.config.train_words import short_decision
from tuner.goals.registry import goal_of_folder
from tuner.plans.train import Plan, Preference, Roomier
from tuner.report.memory_headroom import chance_sentence, memory_warning, trade_words

Page = Callable[[Any], str]
Parsed = Callable[[str], Any]


@pytest.fixture
def own_folder(train_folder: Path, tmp_path: Path) -> Path:
    """A copy, since others read the plan too."""
    return Path(shutil.copytree(train_folder, tmp_path / "plan"))


def with_chance(folder: Path, chance: float, *, is_roomier_found: bool = False) -> Plan:
    """Store another chance in a plan's folder."""
    path = folder / "plan.json"
    plan = Plan.model_validate_json(path.read_text())
    predicted = present(plan.predicted).model_copy(
        update={
            "out_of_memory_probability": chance,
            "out_of_memory_at_start_probability": chance / 2,
            "out_of_memory_loss_s": 5400.0,
        }
    )
    one = Roomier(
        decision=present(plan.decision),
        step_time_s=1.014 * predicted.step_time_s,
        slower_ratio=0.014,
        slower_s=12_240.0,
        peak_memory_bytes=66 * 2**30,
        out_of_memory_probability=0.004,
    )
    plan = plan.model_copy(
        update={
            "predicted": predicted,
            "roomier": one if is_roomier_found else None,
            "roomier_within_ratio": None,
        }
    )
    path.write_text(plan.model_dump_json())
    return plan


@each_row("chance", [0.04, 0.34, 0.9])
def test_a_page_begins_with_the_warning_where_the_chance_is_not_small(
    own_folder: Path, page_of: Page, parsed: Parsed, chance: float
) -> None:
    plan = with_chance(own_folder, chance)
    page = parsed(page_of(goal_of_folder(own_folder).report(own_folder)))
    warnings = [node for node in page.all("p") if node.attributes.get("class") == "warning"]
    first = plan_text(plan, folder=own_folder).splitlines()[0]
    assert [node.attributes.get("role") for node in warnings] == ["alert"] * (chance > 0.05)
    for text in (*(node.text for node in warnings), *([first] if chance > 0.05 else [])):
        assert f"{chance:.0%}".replace("%", "") in text
        assert "chance of running out of memory" in text
    assert first.startswith("WARNING") == (chance > 0.05)
    assert explanation(plan).startswith("WARNING") == (chance > 0.05)
    classes = [node.attributes.get("class") for node in page.all("p")]
    if warnings:
        assert classes.index("warning") < classes.index("verdict")


def test_the_warning_names_the_roomier_decision_and_what_it_costs(own_folder: Path) -> None:
    said = present(memory_warning(with_chance(own_folder, 0.34, is_roomier_found=True)))
    # Of the run: 1.5 h of failed starts and restarts, and 0.34 of 3.4 h.
    in_all = "expected to cost 2.66 h of the run"
    for words in ("34.0 %", "17.0 %", "1.50 h", "66.0 GiB", "0.4 %", "1.4 %", "3.40 h", in_all):
        assert words in said, (words, said)
    alone = present(memory_warning(with_chance(own_folder, 0.34)))
    assert "The search for decisions with more headroom was not finished" in alone


def test_that_nothing_was_found_is_said_only_where_it_was_searched_for(own_folder: Path) -> None:
    plan = with_chance(own_folder, 0.34)
    for ratio, is_said in ((None, False), (0.07, True)):
        said = present(memory_warning(plan.model_copy(update={"roomier_within_ratio": ratio})))
        assert ("No decision found within 7.0 %" in said) == is_said, said
        assert ("was not finished" in said) != is_said, said
        assert "add nodes, or lower usable_memory_ratio" in said
    assert present(memory_warning(plan.model_copy(update={"no_roomier": True}))).endswith(
        "No decision found has a chance below 5.0 %: add nodes or memory per device."
    )


def test_the_chance_is_said_once_and_without_figures_where_there_is_hardly_any(
    own_folder: Path,
) -> None:
    for chance in (0.0, 0.0004, 0.02, 0.34):
        text = plan_text(with_chance(own_folder, chance), folder=own_folder)
        assert text.count("at the start)") == (chance > 0.001), text
        assert ("hardly any chance of running out of memory" in text) == (chance < 0.001), text
        assert text.count("failed starts and restarts are") == (chance > 0.001), text
        assert "expected to cost" not in text, text
        assert ("OOM risk       see the warning" in text) == (chance > 0.05), text


def test_the_length_of_a_run_is_said_where_it_is_assumed(own_folder: Path) -> None:
    plan = with_chance(own_folder, 0.34)
    for tokens, step_s, words in (
        (None, 7.0, "of a run of 7.00 d, assumed as goal.tokens is not stated"),
        (None, 468.0 * 86400.0, "of a run of 468 d, assumed"),
        (10**12, 7.0, "1.50 h of the run"),
    ):
        goal = plan.goal.model_copy(update={"tokens": tokens})
        predicted = present(plan.predicted).model_copy(update={"step_time_s": step_s})
        said = chance_sentence(predicted, goal)
        assert words in said, said
        update = {"goal": goal, "predicted": predicted}
        assert words in (memory_warning(plan.model_copy(update=update)) or "")


def test_without_one_capacity_no_peak_is_paired_with_the_chance(own_folder: Path) -> None:
    plan = with_chance(own_folder, 0.34)
    predicted = present(plan.predicted)
    for capacity, is_said in ((80 * 2**30, True), (None, False)):
        one = predicted.model_copy(update={"memory_capacity_bytes": capacity})
        assert ("GiB predicted of the 80.0 GiB" in chance_sentence(one, plan.goal)) == is_said
        assert ("predicted" in chance_sentence(one, plan.goal)) == is_said


def preferring(folder: Path, chance: float, **values: float | None) -> Plan:
    """A plan whose decision is another than the fastest."""
    plan = with_chance(folder, chance)
    one = Preference(
        fastest=present(plan.decision).model_copy(update={"zero_stage": 3}),
        fastest_step_s=7.18,
        slower_ratio=0.0247,
        reasons=("fewer pipeline stages (8 instead of 16)",),
        expected_step_s=7.36,
        fastest_expected_step_s=7.24,
        fastest_out_of_memory_probability=0.34,
    )
    return plan.model_copy(update={"preferred": one.model_copy(update=values)})


def test_the_trade_is_said_wherever_another_than_the_fastest_is_chosen(own_folder: Path) -> None:
    (said,) = trade_words(preferring(own_folder, 0.01))
    for words in ("7.36 s", "7.24 s", "a tie within 2.0 %"):
        assert words in said, said
    (less,) = trade_words(preferring(own_folder, 0.01, fastest_expected_step_s=7.6))
    assert less.endswith(": less")
    (more,) = trade_words(preferring(own_folder, 0.01, fastest_expected_step_s=7.0))
    assert more.endswith(": 5.1 % more")
    # Slower and riskier, for reasons that come first.
    _, riskier = trade_words(preferring(own_folder, 0.12, fastest_out_of_memory_probability=0.031))
    assert riskier == "12.0 % chance of running out of memory instead of 3.1 %"
    alone = with_chance(own_folder, 0.01).model_copy(update={"preferred": None})
    assert not list(trade_words(alone))


def test_chances_that_are_both_small_are_no_trade(own_folder: Path) -> None:
    """Published peaks are too few to tell 0.1 % from 0.3 %, or 2 % from 4 %."""
    for own, other, is_said in (
        (0.003, 0.001, False),
        (0.001, 0.027, False),
        (0.04, 0.02, False),
        (0.04, 0.004, True),
    ):
        plan = preferring(own_folder, own, fastest_out_of_memory_probability=other)
        said = list(trade_words(plan))
        assert len(said) == is_said, said
        assert not any("expected step" in words for words in said)


def test_of_a_fastest_that_is_excluded_only_that_is_said(own_folder: Path) -> None:
    """Beside one that is likelier to run than not, or where none is, one that is likelier to."""
    for own, other, is_said in ((0.303, 0.59, True), (0.6, 0.9, True), (0.6, 0.65, False)):
        chances: dict[str, float | None] = {"fastest_out_of_memory_probability": other}
        plan = preferring(own_folder, own, **chances, fastest_tried_first_step_s=217.0)
        said = list(trade_words(plan))
        excluded = (
            f"the fastest is excluded: {other:.1%} chance of running out of memory; tried first, "
            "with this plan as fallback, a step is expected to take 3.62 min"
        ).replace("%", " %")
        assert (said == [excluded]) == is_said, said
        older = preferring(own_folder, own, **chances)
        assert (list(trade_words(older)) == [excluded.partition(";")[0]]) == is_said


def test_without_a_decision_that_has_room_no_step_is_expected(own_folder: Path) -> None:
    nothing: dict[str, float | None] = {
        "expected_step_s": None,
        "fastest_expected_step_s": None,
        "fastest_out_of_memory_probability": 0.2,
    }
    said = list(trade_words(preferring(own_folder, 0.45, **nothing)))
    assert said[0].startswith("expected steps are not compared: no decision found has a chance")
    assert said[1] == "45.0 % chance of running out of memory instead of 20.0 %"


def test_what_was_preferred_to_the_fastest_is_said(own_folder: Path) -> None:
    plan = preferring(own_folder, 0.01)
    text = plan_text(plan, folder=own_folder)
    fastest = short_decision(present(plan.preferred).fastest)
    for words in (
        f"preferred 2.5 % slower than the fastest found ({fastest}, 7.18 s)",
        "reason fewer pipeline stages (8 instead of 16)",
    ):
        assert words in flat(text)


def test_a_stored_plan_without_a_chance_is_read_and_says_none(own_folder: Path) -> None:
    values = json.loads((own_folder / "plan.json").read_text())
    for name in [name for name in values["predicted"] if name.startswith("out_of_memory")]:
        del values["predicted"][name]
    values.pop("roomier", None)
    plan = Plan.model_validate(values)
    assert memory_warning(plan) is None
    assert "WARNING" not in plan_text(plan, folder=own_folder)
