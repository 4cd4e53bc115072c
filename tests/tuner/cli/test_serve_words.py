"""What is said of a deployment's plan: targets that are missed, reasons that are alike."""

from pathlib import Path

from tests.expect import contains
from tests.printed import words_of
from tuner.plans.serve import ServePlan
from tuner.report.serve_page import serve_report

PLAN = Path(__file__).parents[3] / "examples" / "checks" / "serve-aggregated" / "plan.json"


def test_reasons_that_differ_in_numbers_alone_take_one_line() -> None:
    plan = ServePlan.model_validate_json(PLAN.read_text(encoding="utf-8"))
    counts = {"buffers hold 1024 tokens, not 2048": 3, "buffers hold 1024 tokens, not 4096": 2}
    space = plan.certificate.space.model_copy(update={"illegal_by": counts | {"no memory": 1}})
    certificate = plan.certificate.model_copy(update={"space": space})
    shown = words_of(serve_report(plan.model_copy(update={"certificate": certificate})))
    assert "runners-up" not in shown, "this plan has none"
    contains(shown, "buffers hold 1024 tokens, not 2048 (1 more such reason) 5", "no memory 1")
