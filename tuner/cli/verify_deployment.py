"""`moetune verify` for serving plans: launch deployments and measure them with a client."""

from pathlib import Path

import typer

from tuner.cli.text import print_exact, print_stderr, print_text


def verify_deployment(
    folder: Path,
    *,
    launcher: str,
    command: str,
    benchmark: str,
    metrics: str,
    url: str,
    health: tuple[str, ...],
    runs: int,
    start_limit: str,
    trials: int,
    repeats: int,
    resume: bool,
    as_json: bool,
) -> None:
    """Launch the deployments that a plan names and print the conclusion.

    Raises:
        SpecError: an option is not for deployments, or cannot be read.
    """
    from tuner import api
    from tuner.cli.deploy_text import serving_verified_text
    from tuner.errors import SpecError
    from tuner.goals.serve_trial import Reached
    from tuner.goals.verify_serve import DeploymentEffort
    from tuner.units import parse_seconds

    if launcher != "command":
        raise SpecError(
            f"--launcher {launcher}: a deployment is launched by a command of yours, e.g."
            " --launcher command --command 'bash {launch}/local.sh'"
        )
    try:
        start_s = parse_seconds(start_limit)
    except ValueError as error:
        raise SpecError(f"--start-limit: {error}") from error
    verified = api.verify_serve(
        folder,
        effort=DeploymentEffort(trials=trials, repeats=repeats),
        resume=resume,
        by=api.deployment_trials(
            folder=folder,
            command=command,
            benchmark=benchmark,
            metrics=metrics,
            runs=runs,
            start_s=start_s,
            on_message=_print_indented,
        ),
        reached=Reached(url=url, health=health),
    )
    if as_json:
        print_exact(verified.model_dump_json(indent=2))
    else:
        print_text(serving_verified_text(verified, folder=folder))
    if verified.winner is None:
        raise typer.Exit(1)


def _print_indented(line: str) -> None:
    print_stderr(f"  {line}")
