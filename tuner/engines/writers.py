"""Every launch target by the name users type, and the function that runs its emitter.

An emitter is a pure function `emit(verified) -> tuple[EmittedFile, ...]`. `hosts.txt` is added
where the plan says which node runs which ranks.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Final, Protocol, cast

from tuner.catalog.manifest import with_adapters, with_gradients
from tuner.catalog.programs import WRAPPERS
from tuner.config.train import TrainDecision
from tuner.engines.files import EmittedFile
from tuner.engines.launchers.hosts import hosts_file
from tuner.engines.launchers.shape import launch_shape
from tuner.engines.registry import TRAIN_ENGINES, engine_file
from tuner.engines.targets import TARGETS, programs
from tuner.plans.train import Plan, VerifiedPlan
from tuner.spec.refusals import refusals

EMITTERS: Final[Mapping[str, tuple[str, str]]] = {
    **{
        target.name: (f"tuner.engines.{folder}.write", target.emitter)
        for folder in TRAIN_ENGINES
        for target in engine_file(folder, "capabilities").TARGETS
    },
    "slurm": ("tuner.engines.launchers.slurm", "emit"),
}
"""Module and function, by the name users type."""


class Emitter(Protocol):
    """Signature of the functions in `EMITTERS`."""

    def __call__(self, verified: VerifiedPlan) -> tuple[EmittedFile, ...]: ...


def broken_rules(target: str, plan: Plan, decision: TrainDecision) -> tuple[str, ...]:
    """Say why a target cannot launch a decision of a plan; empty when it can.

    Raises:
        UnknownTargetError: no target has this name.
    """
    able = with_gradients(
        TARGETS[target]
        if target in WRAPPERS
        else programs((target,)).capabilities(device_kind=plan.provenance.kind_of_devices),
        gradient_bytes=decision.gradient_bytes,
        precision=plan.goal.precision,
    )
    capabilities = with_adapters(able, plan.goal.adapters)
    broken = refusals(capabilities, model=plan.model, decision=decision)
    if target not in WRAPPERS and plan.goal.precision not in capabilities.precisions:
        broken += (f"{target}: has no precision {plan.goal.precision}",)
    return broken


def emit(target: str, verified: VerifiedPlan) -> tuple[EmittedFile, ...]:
    """Return the files of one target, relative to its own folder.

    Raises:
        UnknownTargetError: no target has this name. ValueError: the target cannot express the
        decision; it was planned for another one.
    """
    plan = verified.plan
    if broken := broken_rules(target, plan, verified.decision):
        raise ValueError("; ".join(broken))
    module, name = EMITTERS[target]
    files = cast(Emitter, getattr(import_module(module), name))(verified)
    return files + hosts_file(launch_shape(plan, verified.decision))


def emit_all(verified: VerifiedPlan) -> dict[str, tuple[EmittedFile, ...]]:
    """Return the files of every target of the plan, by target; a wrapper includes its program.

    Raises:
        UnknownTargetError: the plan names a target that does not exist.
    """
    return {target: emit(target, verified) for target in emitted_targets(verified.plan)}


def emitted_targets(plan: Plan) -> tuple[str, ...]:
    """Return every target that a plan writes files for, programs first.

    Raises:
        UnknownTargetError: the plan names a target that does not exist.
    """
    return tuple(dict.fromkeys((*programs(plan.emit).chosen, *plan.emit)))
