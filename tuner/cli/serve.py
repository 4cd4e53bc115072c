"""Options and output of the commands where the goal is to serve."""

from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from tuner.cli.goals import EstimateOptions, VerifyOptions
from tuner.cli.text import print_result, print_stderr, whole_text

if TYPE_CHECKING:
    from tuner.verify.deployments.records import ServeVerified

VERIFY_OPTIONS: Final = ("--bench", "--url", "--health", "--runs", "--start-limit")
PURPOSE: Final = "for plans that serve"
OTHER_LAUNCHER: Final = ""


def estimate(spec: Path, options: EstimateOptions) -> None:
    """Price a server's launch and print it."""
    from tuner.spec.serving.llama_cpp import is_llama_cpp
    from tuner.spec.spec_file import read_spec_keys

    if is_llama_cpp(read_spec_keys(spec)):
        from tuner.cli import llama_cpp

        llama_cpp.estimate(spec, options)
        return
    from tuner.cli.progress import planning_progress
    from tuner.goals.estimate import estimate_serving
    from tuner.report.serving_estimate import serving_estimate_sections

    with planning_progress("pricing", text="the launch, and changes of one thing"):
        result = estimate_serving(
            spec,
            launch=options.launch,
            format_name=options.format_name,
            profiles=tuple(options.profile or ()),
            pool=options.pool,
            instances=options.instances,
            role=options.role,
        )
    print_result(
        result,
        lambda serving_estimate: whole_text(*serving_estimate_sections(serving_estimate)),
        as_json=options.as_json,
    )
    halves = (result,) if result.other is None else (result, result.other)
    if any(half.load is None or not half.load.keeps_up for half in halves):
        raise typer.Exit(1)


def verify(folder: Path, options: VerifyOptions) -> "ServeVerified":
    """Launch the deployments that a plan names and return the conclusion.

    Raises:
        TunerError: an option is not for deployments, or cannot be read.
    """
    from tuner.cli.options import seconds
    from tuner.errors import SpecError
    from tuner.goals.serve_planned import neighbours
    from tuner.goals.serve_trial import Reached
    from tuner.goals.verify import deployment_trials, verify_serve

    if options.launcher != "command":
        raise SpecError(
            f"--launcher {options.launcher}: a deployment is launched by a command of yours, e.g."
            " --launcher command --command 'bash {launch}/local.sh'"
        )
    return verify_serve(
        folder,
        trials=options.trials,
        resume=options.resume,
        by=deployment_trials(
            folder=folder,
            command=options.command,
            benchmark=options.benchmark,
            metrics=options.metrics or "vllm-bench",
            runs=options.runs,
            start_s=seconds(options.start_limit, option="--start-limit"),
            on_message=lambda line: print_stderr(f"  {line}"),
        ),
        reached=Reached(url=options.url, health=tuple(options.health or ())),
        neighbours=neighbours,
    )
