"""Assumptions of an estimate, one line each: balanced routing, settings without a price."""

from collections.abc import Iterator

from tuner.costs.train.expert_capacity import kept_ratio
from tuner.engines.assumptions import DEADLOCK, may_deadlock
from tuner.engines.priced_settings import MEGATRON, PricedSetting
from tuner.engines.reading.launch import LaunchSettings, TrainingEngine, UnpricedSetting
from tuner.estimate.configuration import Configuration
from tuner.estimate.decision import to_decision
from tuner.spec.spec import Spec
from tuner.units import format_ratio

NO_RECORDING = "routing is assumed balanced: no recording was given (goal.routing)"


def unpriced_notes(
    launch: LaunchSettings, configuration: Configuration, spec: Spec
) -> Iterator[str]:
    """Yield notes on settings that the estimate does not price."""
    if spec.model.moe is not None and spec.routing is None:
        yield f"{NO_RECORDING}; {_balanced_by(launch)}"
    if configuration.expert_capacity is not None and spec.model.moe is not None:
        yield _capacity(configuration, spec.model.moe.num_experts)
    if not launch.engine.is_megatron:
        return
    differing = [
        f"{said} ({_quantity(row)})"
        for row, said in _differing(launch, configuration, spec)
        if not row.changes
    ]
    if differing:
        yield f"the launch differs from what is priced: {'; '.join(differing)}"
    if may_deadlock(to_decision(configuration, spec.model)):
        yield DEADLOCK


def _capacity(configuration: Configuration, num_experts: int) -> str:
    capacity = configuration.expert_capacity or 1.0
    if configuration.pads_to_capacity:
        return f"every expert computes {capacity:g} times the mean load, padded where it is less"
    kept = format_ratio(kept_ratio(capacity, num_experts=num_experts))
    return (
        f"experts drop copies beyond {capacity:g} times the mean load: memory is priced with {kept}"
        " of the copies, as recorded loads keep, and time with the most-loaded rank's"
    )


def unpriced_settings(
    launch: LaunchSettings, configuration: Configuration, spec: Spec
) -> Iterator[UnpricedSetting]:
    """Yield the settings with which the prediction does not hold."""
    yield from launch.unpriced
    for row, said in _differing(launch, configuration, spec):
        if row.changes:
            how = f"priced is that {_quantity(row)}"
            yield UnpricedSetting(said=said, changes=row.changes, how=how)


def _differing(
    launch: LaunchSettings, configuration: Configuration, spec: Spec
) -> Iterator[tuple[PricedSetting, str]]:
    """Yield the rows that the launch sets to another value, as it says it."""
    decision = to_decision(configuration, spec.model)
    rows = {row.name: row for row in MEGATRON if row.applies(spec.model, decision)}
    for name, said in launch.differing_settings.items():
        if name in rows:
            yield rows[name], said


def _quantity(row: PricedSetting) -> str:
    return f"{row.quantity}{_value(row.priced)}"


def _value(priced: object) -> str:
    """Return the priced value where the words do not imply it."""
    return "" if isinstance(priced, bool) or priced is None else f": {priced}"


def _balanced_by(launch: LaunchSettings) -> str:
    if launch.engine is TrainingEngine.TORCHTITAN:
        return "torchtitan's expert bias is to balance it"
    if launch.engine in (TrainingEngine.DEEPSPEED, TrainingEngine.TRANSFORMERS):
        return "your program's auxiliary loss is to balance it"
    if launch.balance:
        return f"{launch.balance} is to balance it"
    return (
        "nothing in the launch balances it (--moe-aux-loss-coeff is 0.0 unless given, and no "
        "expert bias is enabled): expect slower steps and more memory on the most-loaded ranks"
    )
