"""Measures the steps of a spec's engine by short launches, for the profile of its device.

What is launched is the smallest instance that holds the model, aggregated, and one of twice its
tensor degree, where the pool has the devices: ranks that share a step wait for each other. Larger
degrees, more instances, and prefill and decode apart are priced with the rates that these steps
reached (tuner/calibrate/engine_rates.py).
"""

import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from profilers.store import read_header
from tuner.config.serve import Instances
from tuner.costs.serve.engine_steps import (
    EngineSteps,
    LaunchSteps,
    write_engine_steps,
)
from tuner.devices.datasheet import Generation
from tuner.engines.serve_writers import unlaunchable
from tuner.errors import EnvironmentMissingError, SpecError
from tuner.goals.serve_plan import Deployed, plan_deployment
from tuner.goals.serve_spec import read_serve_spec
from tuner.goals.serve_trial import Reached, prepared_launch, write_launch_files
from tuner.paths import AnyPath
from tuner.plans.serve import VerifiedServing
from tuner.search.settings import SearchSettings
from tuner.spec.serving.goal import Slo
from tuner.spec.serving.spec import ServeSpec
from tuner.spec.serving.traffic import Traffic
from tuner.verify.command import parse_template
from tuner.verify.deployments.launcher import (
    SERVER_PLACEHOLDERS,
    DeploymentLaunch,
    DeploymentStarter,
    LaunchFailedError,
    named_model,
)
from tuner.verify.deployments.step_client import MOST_OUTPUTS, StepClient, StepsUnmeasurableError
from tuner.verify.termination import exclusive_use

PROMPTS: Final = (16, 64, 256, 960)
"""Tokens of the prompts that are timed, as far as the model and a step's budget allow."""
SEQUENCES: Final = (1, 2, 4, 8, 16)
"""Sequences that run at once, as far as the launch allows."""
PASTS: Final = (32, 512)
TIME_LIMIT_S: Final = 20.0
LAUNCHES_NAME: Final = "engine-launches"
"""Name of the folder of launches inside the profile's, while the engine runs."""


def profile_engine(
    profile: AnyPath,
    spec_path: AnyPath,
    *,
    command: str,
    url: str = "",
    start_s: float,
    on_message: Callable[[str], None],
    environment: Mapping[str, str] = os.environ,
) -> EngineSteps:
    """Launch the smallest instances of a spec's engine, measure their steps, and store them.

    Args:
        profile: folder with the profile of the device; `engine.json` is written there.
        spec_path: a spec that serves.
        command: template that starts the emitted files, as of `moetune verify`.
        url: where it answers; empty: as the emitted local.sh starts it.
        start_s: longest start-up.
        on_message: gets progress messages.
        environment: of the command.

    Raises:
        SpecError: the spec does not serve, or no single instance holds the model.
        EnvironmentMissingError: the engine does not start, or refuses the requests.
        ProfileUnreadableError: the profile is damaged.
    """
    profile = Path(profile)
    header = read_header(profile)
    spec = read_serve_spec(Path(spec_path))
    plan = _smallest(spec, profile).plan
    decision, predicted = plan.decision, plan.predicted
    if decision is None or predicted is None:
        raise SpecError(
            f"{spec.path}: no single instance holds the model: {plan.binding_constraint}"
        )
    group = decision.instances[0].model_copy(update={"count": 1})
    pool = next(candidate for candidate in spec.cluster.pools if candidate.name == group.pool)
    wider = group.model_copy(
        update={
            "attention_tp": 2 * group.attention_tp,
            "moe_tp": 2 * group.moe_tp,
            "devices": 2 * group.devices,
        }
    )
    starter = DeploymentStarter(
        command=parse_template(
            command, placeholders=SERVER_PLACEHOLDERS, example="bash {launch}/local.sh"
        ),
        start_s=start_s,
        environment=environment,
        prepare=lambda launch: write_launch_files(launch, None),
        on_message=on_message,
    )
    measured, launches = [], profile / LAUNCHES_NAME
    with exclusive_use(launches, plan=profile) as scratch:
        for number, instances in enumerate((group, wider)):
            single_decision = decision.model_copy(
                update={"instances": (instances,), "router": None}
            )
            verified = VerifiedServing(plan=plan, decision=single_decision, predicted=predicted)
            if instances.devices > pool.num_devices or unlaunchable(verified):
                continue
            launch = prepared_launch(
                plan, single_decision, predicted, number, scratch, Reached(url=url)
            )
            on_message(f"tensor parallel {instances.attention_tp}")
            measured.append(
                LaunchSteps(
                    tensor_parallel=instances.attention_tp,
                    **_points(starter, launch, spec, instances),
                )
            )
    shutil.rmtree(launches, ignore_errors=True)
    steps = EngineSteps(
        engine=spec.goal.engine_on(group.pool).name,
        release=spec.releases[pool.name].release,
        device=header.machine.device,
        command=command,
        model=spec.model,
        launches=tuple(measured),
    )
    write_engine_steps(profile, steps)
    return steps


def _smallest(spec: ServeSpec, profile: Path) -> Deployed:
    """Plan one instance on as few devices as possible, by the profile's kernels.

    Raises:
        SpecError: no pool of the spec is of processors, which such a profile describes.
    """
    pools = tuple(
        pool
        for pool in spec.cluster.pools
        if pool.device is not None and pool.sheet.generation is Generation.PROCESSOR
    )
    if not pools:
        raise SpecError(
            f"{spec.path}: the suite engine is for processors (device: cpu); accelerators are"
            " priced by kernel tables, see --profile of moetune plan"
        )
    cluster = spec.cluster.model_copy(update={"pools": pools[:1], "links": ()})
    releases = {pools[0].name: spec.releases[pools[0].name]}
    traffic = Traffic(concurrency=max(SEQUENCES), input_tokens=max(PASTS), output_tokens=64)
    goal = spec.goal.model_copy(
        update={"modes": ("aggregated",), "slo": Slo(), "objective": "devices", "traffic": traffic}
    )
    return plan_deployment(
        replace(spec, goal=goal, cluster=cluster, releases=releases),
        (profile,),
        settings=SearchSettings(time_limit_s=TIME_LIMIT_S),
    )


def _points(
    starter: DeploymentStarter, launch: DeploymentLaunch, spec: ServeSpec, group: Instances
) -> dict[str, Any]:
    """Start one instance; measure prompts and running sequences, the smallest first."""
    most_tokens = spec.goal.max_model_len or spec.model.max_position
    longest = min(group.max_batched_tokens, most_tokens - 1)
    lengths = [tokens for tokens in PROMPTS if tokens <= longest] or [longest]
    pasts = [past for past in PASTS if past + MOST_OUTPUTS <= longest] or [max(longest // 4, 1)]
    try:
        begun_s = time.monotonic()
        with starter.started(launch):
            start_up_s = time.monotonic() - begun_s
            key = starter.environment.get("OPENAI_API_KEY", "")
            client = StepClient(
                url=launch.url,
                model=named_model(launch.url, key) or starter.environment.get("MODEL", ""),
                key=key,
                vocabulary=spec.model.vocab_size,
            )
            # A first request of each length compiles what it needs, where an engine compiles.
            for tokens in lengths:
                client.prompt_point(tokens)
            return {
                "start_up_s": start_up_s,
                "prompts": tuple(client.prompt_point(tokens) for tokens in lengths),
                "decodes": tuple(
                    client.decode_point(sequences, past)
                    for sequences in SEQUENCES
                    if sequences <= group.max_batch
                    for past in pasts
                ),
            }
    except (LaunchFailedError, StepsUnmeasurableError) as failed:
        reason = f"the engine's steps were not measured: {failed}"
        raise EnvironmentMissingError(reason) from failed
