"""What the page of a training plan says of its proof, and of changes of the spec."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.expect import present
from tests.printed import flat
from tests.rows import each_row
from tuner.cli.plan_text import explanation, plan_text
from tuner.config.host_memory import HostMemory
from tuner.config.train_words import short_decision
from tuner.goals.place_folder import read_place_plan
from tuner.goals.train_folder import read_plan
from tuner.plans.train import Plan, Preference, Relaxation
from tuner.report.content import Evidence
from tuner.report.place_page import place_report
from tuner.report.train_page import train_report

CHECKS = Path(__file__).parents[3] / "examples" / "checks"

Page = Callable[[Any], str]
Parsed = Callable[[str], Any]

OF_STATUS = {
    "optimal": "proven optimal under the model",
    "feasible": "within 14.3 % of optimal under the model",
}


def _page(plan: Plan) -> Any:
    return train_report(plan, Evidence())


def _preferring(plan: Plan, status: str) -> Plan:
    gap = 0.125 if status == "feasible" else 0.0
    certificate = plan.certificate.model_copy(
        update={"status": status, "gap_ratio": gap, "decision_gap_ratio": gap + 0.01}
    )
    fastest = present(plan.decision).model_copy(update={"zero_stage": 3})
    one = Preference(
        fastest=fastest, fastest_step_s=7.0, slower_ratio=0.01, reasons=("fewer stages",)
    )
    return plan.model_copy(update={"certificate": certificate, "preferred": one})


@each_row("status", OF_STATUS)
def test_the_fastest_is_called_proven_only_where_the_certificate_says_so(
    train_folder: Path, page_of: Page, parsed: Parsed, status: str
) -> None:
    plan = _preferring(read_plan(train_folder), status)
    said, other = OF_STATUS[status], next(one for name, one in OF_STATUS.items() if name != status)
    fastest = short_decision(present(plan.preferred).fastest)
    page = parsed(page_of(_page(plan)))
    texts = {
        "plan": flat(plan_text(plan, folder=train_folder)),
        "explain": flat(explanation(plan)),
        "page": " ".join(node.text for node in page.all("p")),
    }
    for name, text in texts.items():
        assert said in text, (name, text)
        assert other not in text, (name, text)
    for text in texts.values():
        assert f"the fastest found is {said}, the decision itself within " in text
    assert f"slower than the fastest found ({fastest}, 7.00 s)" in texts["explain"]


def test_memory_of_hosts_stands_on_every_view(
    train_folder: Path, page_of: Page, parsed: Parsed
) -> None:
    plan = read_plan(train_folder)
    held = HostMemory(parts={"optimizer": 514 << 30, "copies of checkpoints": 6 << 30})
    plan = plan.model_copy(
        update={"predicted": present(plan.predicted).model_copy(update={"host_memory": held})}
    )
    page = parsed(page_of(_page(plan))).text
    for text in (plan_text(plan, folder=train_folder), explanation(plan), page):
        assert "520 GiB" in flat(text)


def test_changes_are_captioned_by_what_they_would_bring(
    train_folder: Path, page_of: Page, parsed: Parsed
) -> None:
    plan = read_plan(train_folder)
    relaxations = (
        Relaxation(limit="nodes", change="4 nodes instead of 2: 32 devices"),
        Relaxation(limit="memory_per_device", change="90.0 GiB usable instead of 76.0 GiB"),
    )
    with_decision = plan.model_copy(update={"relaxations": relaxations})
    certificate = plan.certificate.model_copy(update={"status": "infeasible"})
    nothing = {"decision": None, "predicted": None, "alternatives": (), "variants": ()}
    without = with_decision.model_copy(update={**nothing, "certificate": certificate})
    for one, heading, caption in (
        (
            with_decision,
            "More memory headroom",
            "Changes that give a configuration memory headroom",
        ),
        (without, "Relaxations", "Changes that make a configuration fit"),
    ):
        page = parsed(page_of(_page(one)))
        headings = [node.text for node in page.all("h2")]
        captions = [node.text for node in page.all("caption")]
        assert heading in headings, headings
        assert caption in captions, captions
        assert all(relaxation.change in page_of(_page(one)) for relaxation in relaxations)
    both = {"More memory headroom", "Relaxations"}
    plain = parsed(page_of(_page(plan.model_copy(update={"relaxations": ()}))))
    assert not both & {node.text for node in plain.all("h2")}


def test_a_search_that_ended_early_is_not_said_to_fit_nothing(train_folder: Path) -> None:
    plan = read_plan(train_folder)
    binding = "whether anything fits is not known: 3 combinations were neither solved nor ruled out"
    for status, verdict, label in (
        ("infeasible", "Nothing fits", "limit not met"),
        ("unknown", "Not decided", "not decided"),
    ):
        one = plan.model_copy(
            update={
                "decision": None,
                "predicted": None,
                "certificate": plan.certificate.model_copy(update={"status": status}),
                "binding_constraint": binding,
            }
        )
        assert _page(one).verdict.startswith(verdict)
        assert f"{label} {binding}" in flat(plan_text(one, folder=train_folder))
    placed = read_place_plan(CHECKS / "place-balance")
    certificate = placed.certificate.model_copy(update={"status": "unknown"})
    page = place_report(placed.model_copy(update={"decision": None, "certificate": certificate}))
    assert "Not decided" in page.verdict
    assert "Infeasible" not in page.proof


def test_the_reference_step_claims_no_published_peaks(page_of: Page) -> None:
    for name, has_peaks in (("train-measured", False), ("train-mixtral", True)):
        assert (
            "errors of published peaks" in page_of(_page(read_plan(CHECKS / name)))
        ) == has_peaks
