"""What is said of a deployment's plan: targets that are missed, reasons that are alike."""

from pathlib import Path

from tests.printed import words_of
from tests.tuner.models import MODELS
from tuner.goals.serve_plan import deploy
from tuner.report.serve_page import serve_report


def test_reasons_that_differ_in_numbers_alone_take_one_line(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(
        "schema_version: 1\n"
        f"model: {MODELS / 'mixtral-8x7b'}\n"
        "cluster: {pools: [{name: h100, device: h100-sxm, nodes: 1, devices_per_node: 8}]}\n"
        "goal:\n"
        "  kind: serve\n"
        "  engine: {name: vllm}\n"
        "  traffic: {rate: 2/s, input_tokens: 1000, output_tokens: 100}\n"
        "  slo: {ttft: {p90: 3s}, tpot: {p90: 50ms}}\n"
        "  modes: [aggregated]\n"
    )
    plan = deploy(spec, time_limit_s=20.0).plan
    counts = {"buffers hold 1024 tokens, not 2048": 3, "buffers hold 1024 tokens, not 4096": 2}
    space = plan.certificate.space.model_copy(update={"illegal_by": counts | {"no memory": 1}})
    certificate = plan.certificate.model_copy(update={"space": space})
    shown = words_of(serve_report(plan.model_copy(update={"certificate": certificate})))
    assert "buffers hold 1024 tokens, not 2048 (1 more such reason) 5" in shown
    assert "no memory 1" in shown
