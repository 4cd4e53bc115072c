"""A deployment's decision as a launch: its files, address and workload."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tuner.config.serve import ServeDecision
from tuner.engines.files import launch_files
from tuner.engines.launchers.benchmark import num_requests, num_warmups, offered_traffic
from tuner.engines.serve_writers import emit_all_serving, unlaunchable
from tuner.engines.serving.command import FIRST_PORT, PORTS_PER_INSTANCE
from tuner.engines.serving.islands import of_pools_used
from tuner.engines.serving.router import ROUTER_PORT, needs_router
from tuner.engines.serving.shape import group_shapes, url_list
from tuner.errors import SpecError, UnsuitedPlacementError
from tuner.output import write_files
from tuner.plans.place import VerifiedPlacement
from tuner.plans.serve import ServePlan, ServePrediction, VerifiedServing
from tuner.spec.serving.lengths import mean_tokens
from tuner.verify.deployments.launcher import DeploymentLaunch, LaunchFailedError, check_address

LOCAL: Final = "local"
"""The target whose script starts a deployment on this machine."""

TRIAL: Final = "this is a trial of the plan"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """Address of a deployment; empty: as the emitted script for this machine starts it."""

    url: str = ""
    health: tuple[str, ...] = ()


def prepared_launch(
    plan: ServePlan,
    decision: ServeDecision,
    predicted: ServePrediction,
    number: int,
    scratch: Path,
    reached: Reached,
) -> DeploymentLaunch:
    """Return the launch of one decision, with a folder of its own in `scratch`.

    Raises:
        SpecError: it is not said where the deployment answers.
    """
    verified = VerifiedServing(plan=plan, decision=decision, predicted=predicted, waived=TRIAL)
    if len(decision.islands) > 1 and not reached.url:
        named = ", ".join(f"launch/{island.name}" for island in decision.islands)
        raise SpecError(
            f"the deployment is of {len(decision.islands)} islands, which no one script starts:"
            f" start {named} and launch/front, and give --url its address"
        )
    url, addresses = _addresses(verified, reached)
    traffic, requests = offered_traffic(verified), num_requests(verified)
    folder = scratch / f"{number:04d}"
    # The emitter writes the scripts of the engine that the pools used have.
    launched_plan = of_pools_used(verified).plan if len(decision.islands) < 2 else plan
    started_by = LOCAL if LOCAL in launched_plan.emit else launched_plan.goal.engine.name
    values = {
        "launch": str((folder / "launch" / started_by).resolve()),
        "devices": str(decision.num_devices),
        "requests": str(requests),
        "warmups": str(num_warmups(verified)),
        # An open load of infinite rate is what clients call a closed loop.
        "rate": "inf" if traffic.rate is None else f"{traffic.rate:.6g}",
    }
    if traffic.concurrency is not None:
        values["concurrency"] = str(traffic.concurrency)
    for name, law in (
        ("input_tokens", traffic.input_tokens),
        ("output_tokens", traffic.output_tokens),
    ):
        if law is not None:
            values[name] = str(max(1, round(mean_tokens(law))))
    return DeploymentLaunch(
        number=number,
        plan=plan,
        decision=decision,
        predicted=predicted,
        folder=folder,
        url=url,
        addresses=addresses,
        values=values,
        run_s=requests / max(predicted.requests_per_s, 1e-9),
    )


def _addresses(verified: VerifiedServing, reached: Reached) -> tuple[str, tuple[str, ...]]:
    """Return where requests go, and the health checks."""
    health = tuple(check_address(address, option="--health") for address in reached.health)
    if reached.url:
        url = check_address(reached.url, option="--url").rstrip("/")
        return url, health or (f"{url}/health",)
    if LOCAL not in verified.plan.emit:
        raise SpecError(
            "--url: say where the deployment answers, e.g. http://host:8000; only a plan that emits"
            f" {LOCAL!r} says so itself"
        )
    servers = [
        f"http://127.0.0.1:{FIRST_PORT + PORTS_PER_INSTANCE * (shape.first + instance)}"
        for shape in group_shapes(verified)
        if url_list(shape.group.role) is not None
        for instance in range(shape.group.count)
    ]
    url = f"http://127.0.0.1:{ROUTER_PORT}" if needs_router(verified) else servers[0]
    return url, health or tuple(f"{address}/health" for address in dict.fromkeys((*servers, url)))


def write_launch_files(launch: DeploymentLaunch, placement: VerifiedPlacement | None) -> None:
    """Write the emitted files of a launch into its folder.

    Raises:
        LaunchFailedError: no file can express it, or its instances cannot take the placement.
    """
    trial = VerifiedServing(
        plan=launch.plan, decision=launch.decision, predicted=launch.predicted, waived=TRIAL
    )
    if broken := unlaunchable(trial):
        raise LaunchFailedError(status="crashed", reason="; ".join(broken)[:300])
    try:
        files = launch_files(emit_all_serving(trial, placement=placement))
    except UnsuitedPlacementError as error:
        raise LaunchFailedError(status="crashed", reason=str(error)[:300]) from error
    write_files(launch.folder, files.contents, executable=files.executable)
