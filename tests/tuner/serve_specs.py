"""Specs of deployments, and their plans on datasheets."""

from pathlib import Path

from tests.tuner.models import MODELS
from tuner.goals.serve_plan import deploy
from tuner.plans.serve import ServePlan

H100 = "{name: h100, device: h100-sxm, nodes: 2, devices_per_node: 8, price_per_device_hour: 3.0}"


def serve_spec(
    folder: Path,
    *,
    model: str = "mixtral-8x7b",
    pools: str = H100,
    links: str = "",
    engine: str = "vllm",
    traffic: str = "{rate: 10/s, input_tokens: 2000, output_tokens: 300}",
    slo: str = "{ttft: {p90: 1s}, tpot: {p90: 50ms}}",
    extra: str = "objective: devices",
    emit: str = "",
) -> Path:
    """Write `spec.yaml` into a folder; `extra` are further lines of the goal."""
    path = folder / "spec.yaml"
    path.write_text(
        f"schema_version: 1\nmodel: {MODELS / model}\n"
        f"cluster: {{pools: [{pools}], links: [{links}]}}\n"
        f"goal:\n  kind: serve\n  engine: {{name: {engine}}}\n  traffic: {traffic}\n"
        f"  slo: {slo}\n  {extra}\nemit: [{emit}]\n",
        encoding="utf-8",
    )
    return path


def plan_of(path: Path) -> ServePlan:
    """Plan a spec."""
    return deploy(path, time_limit_s=20.0).plan


def planned(folder: Path, **fields: str) -> ServePlan:
    """Write a spec and plan it: planned(folder, model="llama-3.1-8b", ...) -> its plan."""
    return plan_of(serve_spec(folder, **fields))
