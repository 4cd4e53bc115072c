"""Specs of deployments, their pools on datasheets, and launches read against them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tuner.engines.reading.serve_launch import ServingLaunch
from tuner.estimate.serving.changes import price_changes
from tuner.estimate.serving.estimate import Advise, estimate_serving, pool_named, surroundings
from tuner.estimate.serving.records import ServingChange, ServingEstimate
from tuner.estimate.serving.registry import read_serving_text
from tuner.goals.serve_plan import price_serving_pool
from tuner.goals.serve_spec import read_serve_spec
from tuner.spec.serving.spec import ServeSpec

MODELS = Path(__file__).parents[4] / "examples" / "models"


def no_changes(*_: object) -> tuple[ServingChange, ...]:
    """Advise nothing, for tests of the launch alone."""
    return ()


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """A spec, and what it makes of launches."""

    spec: ServeSpec

    def read(self, text: str) -> ServingLaunch:
        return read_serving_text(
            text,
            surroundings(self.spec, pool_named(self.spec, None)),
            engine=self.spec.goal.engine.name,
            source="launch.sh",
        )

    def estimate(
        self, text: str, *, instances: int = 1, release: str = "", advise: Advise = price_changes
    ) -> ServingEstimate:
        return estimate_serving(
            self.spec,
            self.read(text),
            serving_pool=price_serving_pool(pool_named(self.spec, None), ()),
            instances=instances,
            release=release,
            advise=advise,
        )

    def predict(self, text: str, *, instances: int = 1, release: str = "") -> ServingEstimate:
        """Estimate a launch without changes of it, which take most of the time."""
        return self.estimate(text, instances=instances, release=release, advise=no_changes)


@pytest.fixture
def deployment(tmp_path: Path) -> Callable[..., Deployment]:
    def made(
        *,
        model: str = "mixtral-8x7b",
        engine: str = "vllm",
        device: str = "h100-sxm",
        nodes: int = 2,
        devices_per_node: int = 8,
        nics: str = "",
        traffic: str = "{rate: 5/s, input_tokens: 2000, output_tokens: 300}",
        slo: str = "{ttft: {p90: 1s}, tpot: {p90: 50ms}}",
        extra: str = "objective: devices",
    ) -> Deployment:
        path = tmp_path / "spec.yaml"
        path.write_text(
            "schema_version: 1\n"
            f"model: {MODELS / model}\n"
            "cluster:\n"
            f"  pools: [{{name: gpus, device: {device}, nodes: {nodes},"
            f" devices_per_node: {devices_per_node}{nics and ', '}{nics}}}]\n"
            "goal:\n"
            "  kind: serve\n"
            f"  engine: {{name: {engine}}}\n"
            f"  traffic: {traffic}\n"
            f"  slo: {slo}\n"
            f"  {extra}\n"
        )
        return Deployment(spec=read_serve_spec(path))

    return made
