"""Every target of a serving deployment, and the function that runs its emitter.

`sglang`, `vllm` and `trtllm` are programs: one must be the plan's engine. The others start the
plan's engine; `slurm` and `local` use the scripts of its folder, which is emitted with them.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Final, Protocol, cast

from tuner.catalog.serve_rules.autoscalers import AUTOSCALERS
from tuner.catalog.serve_rules.rules import refusals
from tuner.engines.files import EmittedFile
from tuner.engines.serving.islands import FRONT, front_files, island_parts, of_pools_used
from tuner.engines.serving.placement import ServedPlacement, served_placement_for
from tuner.engines.serving.releases import (
    ENGINES,
    release_on,
    releases_by_pool,
    target_refusals,
)
from tuner.errors import UnknownTargetError, UnsuitedPlacementError
from tuner.plans.place import VerifiedPlacement
from tuner.plans.serve import VerifiedServing

SERVE_EMITTERS: Final[Mapping[str, str]] = {
    **dict.fromkeys(ENGINES, "tuner.engines.serving.scripts:emit"),
    "dynamo": "tuner.engines.launchers.dynamo:emit",
    "kubernetes": "tuner.engines.launchers.kubernetes:emit",
    "slurm": "tuner.engines.launchers.serve_slurm:emit",
    "local": "tuner.engines.launchers.local:emit",
}
"""Module and function of the emitter by the name users type."""

_NEED_SCRIPTS: Final = frozenset({"slurm", "local"})


class ServeEmitter(Protocol):
    """Signature of the functions in `SERVE_EMITTERS`."""

    def __call__(
        self, verified: VerifiedServing, placement: ServedPlacement | None
    ) -> tuple[EmittedFile, ...]: ...


def unlaunchable(verified: VerifiedServing) -> tuple[str, ...]:
    """Return what keeps the plan's engine from launching the decision, a line each.

    Raises:
        UnknownTargetError: the engine's release is not described.
    """
    plan = verified.plan
    pools = plan.cluster.pools
    sheets = {pool.name: pool.sheet for pool in pools if pool.device is not None}
    unknown = sorted(
        group.pool
        for group in verified.decision.instances
        if group.prefill_share_ratio is not None and group.pool not in sheets
    )
    return (
        *refusals(
            release_on(plan.goal, plan.cluster.pools[0]),
            verified.decision,
            model=plan.model,
            goal=plan.goal,
            devices_per_node={pool.name: pool.devices_per_node for pool in pools},
            sheets=sheets,
            releases=releases_by_pool(plan.goal, pools),
        ),
        *(
            f"pool {name}: to multiplex a device its number of SMs must be known; state 'device'"
            for name in unknown
        ),
    )


def emit_serving(
    target: str, verified: VerifiedServing, *, placement: VerifiedPlacement | None = None
) -> tuple[EmittedFile, ...]:
    """Return the files of one target, relative to its own folder.

    Args:
        target: of `SERVE_EMITTERS`.
        verified: the deployment.
        placement: of the experts, for the groups that have its number of expert ranks.

    Raises:
        UnknownTargetError: no target has this name, it cannot start such instances, or the engine's
            release is not described.
        UnsuitedPlacementError: engine or instances cannot take the placement, or the plan counts on
            one that is not given.
        ValueError: the engine cannot express the decision; it was planned for another release.
    """
    if target not in SERVE_EMITTERS:
        raise UnknownTargetError(
            f"emit: {target!r} is no serving target; there are"
            f" {', '.join((*SERVE_EMITTERS, *AUTOSCALERS))}"
        )
    engine = verified.plan.goal.engine.name
    if target in ENGINES and target != engine:
        raise UnknownTargetError(
            f"emit: the deployment is for {engine}, not {target}; name {engine}, or plan with"
            f" goal.engine.name {target}"
        )
    broken = unlaunchable(verified)
    if broken:
        raise ValueError("; ".join(broken))
    if lines := target_refusals((target,), verified.decision.mode):
        raise UnknownTargetError(lines[0])
    if placement is None and verified.plan.goal.placement is not None:
        raise UnsuitedPlacementError(
            f"goal.placement: the deployment counts on {verified.plan.goal.placement}; emit that"
            " placement with it, or plan without"
        )
    served_placement = served_placement_for(engine, placement, verified.decision.instances)
    module, _, name = SERVE_EMITTERS[target].partition(":")
    return cast(ServeEmitter, getattr(import_module(module), name))(verified, served_placement)


def emit_all_serving(
    verified: VerifiedServing, *, placement: VerifiedPlacement | None = None
) -> dict[str, tuple[EmittedFile, ...]]:
    """Return the files of every target of the plan; launchers include their scripts.

    Each island has a folder of its own with all targets, beside the router in front.

    Raises:
        UnknownTargetError: the plan names a target that does not exist or is another engine.
        UnsuitedPlacementError: engine or instances cannot take the placement, or the plan counts on
            one that is not given.
        ValueError: the engine cannot express the decision; it was planned for another release.
    """
    if len(verified.decision.islands) > 1:
        return _emit_islands(verified, placement=placement)
    verified = of_pools_used(verified)
    named = verified.plan.emit
    brought = (verified.plan.goal.engine.name,) if _NEED_SCRIPTS & set(named) else ()
    return {
        target: emit_serving(target, verified, placement=placement)
        for target in dict.fromkeys((*brought, *named))
        if target not in AUTOSCALERS  # Their objects are beside those of Kubernetes.
    }


def _emit_islands(
    verified: VerifiedServing, *, placement: VerifiedPlacement | None
) -> dict[str, tuple[EmittedFile, ...]]:
    """Emit each island into a folder of its own, and the router in front of all."""
    broken = unlaunchable(verified)
    if broken:
        raise ValueError("; ".join(broken))
    emitted_files: dict[str, tuple[EmittedFile, ...]] = {}
    for name, part in island_parts(verified):
        files = emit_all_serving(part, placement=placement)
        emitted_files |= {f"{name}/{target}": emitted for target, emitted in files.items()}
    return emitted_files | ({FRONT: front_files(verified)} if emitted_files else {})
