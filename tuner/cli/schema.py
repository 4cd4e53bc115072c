"""`moetune schema NAME`: the JSON Schema of a stored file."""

import json
from collections.abc import Mapping
from importlib import import_module
from typing import Annotated, Any, Final

import typer

from tuner.cli.text import print_exact
from tuner.errors import TunerError

SCHEMAS: Final[Mapping[str, str]] = {
    "spec": "tuner.spec.spec:SpecFile",
    "plan": "tuner.plans.train:Plan",
    "verified": "tuner.verify.records:Verified",
    "profile": "profilers.records:ProfileHeader",
    "recording": "profilers.routing.store:RecordingHeader",
    "step": "profilers.steps.config:StepConfig",
    "estimate": "tuner.estimate.records:Estimate",
    "backtest": "tuner.backtest.records:Backtest",
    "check": "tuner.regress.records:Check",
    "comparison": "tuner.explain.comparison:Comparison",
    "report": "tuner.report.written:Written",
    "residuals": "tuner.costs.train.calibration:Residuals",
    "place-spec": "tuner.spec.place_spec:PlaceSpecFile",
    "place-plan": "tuner.plans.place:PlacePlan",
    "place-verified": "tuner.verify.placement_records:PlaceVerified",
    "serve-spec": "tuner.spec.serving.spec:ServeSpecFile",
    "serve-plan": "tuner.plans.serve:ServePlan",
    "serve-verified": "tuner.verify.deployments.records:ServeVerified",
    "serving-estimate": "tuner.estimate.serving.records:ServingEstimate",
    "rl-spec": "tuner.spec.rl:RlSpecFile",
    "rl-estimate": "tuner.estimate.rl.records:RlEstimate",
    "rl-backtest": "tuner.backtest.rl.records:RlBacktest",
    "serving-backtest": "tuner.backtest.serving.records:ServingBacktest",
    "calibration": "tuner.calibrate.records:CalibrationReport",
    "serving-calibration": "tuner.calibrate.serving_stored:ServingCalibration",
    "server-calibration": "tuner.calibrate.server_records:ServerCalibration",
    "explained-plan": "tuner.goals.train:ExplainedPlan",
    "explained-place-plan": "tuner.goals.place:ExplainedPlacePlan",
    "explained-serve-plan": "tuner.goals.serve:ExplainedServePlan",
    "shown-profile": "profilers.records:Profile",
    "shown-recording": "tuner.cli.printed:ShownRecording",
    "profile-diff": "tuner.cli.printed:ProfileDiff",
    "doctor": "tuner.cli.printed:Doctor",
}


def _names(incomplete: str) -> list[str]:
    return [name for name in SCHEMAS if name.startswith(incomplete)]


def command(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help=f"One of {', '.join(SCHEMAS)}.",
            show_default=False,
            autocompletion=_names,
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="The same; a schema is JSON.")] = False,
) -> None:
    """Print the JSON Schema of a file that moetune reads or writes."""
    print_exact(json.dumps(json_schema(name), indent=None if as_json else 2))


def json_schema(name: str) -> dict[str, Any]:
    """Return the schema of one stored type.

    Raises:
        TunerError: no stored type has this name.
    """
    if name not in SCHEMAS:
        raise TunerError(f"schema {name!r} is not one of {', '.join(SCHEMAS)}")
    module, _, attribute = SCHEMAS[name].partition(":")
    schema: dict[str, Any] = getattr(import_module(module), attribute).model_json_schema()
    return schema
