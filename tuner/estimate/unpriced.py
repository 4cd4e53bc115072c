"""Assumptions of an estimate, one line each: balanced routing, settings without a price."""

from collections.abc import Iterator

from tuner.engines.assumptions import DEADLOCK, may_deadlock
from tuner.engines.priced_settings import MEGATRON
from tuner.engines.reading.launch import LaunchSettings, TrainingEngine
from tuner.estimate.configuration import Configuration
from tuner.estimate.decision import to_decision
from tuner.spec.spec import Spec

NO_RECORDING = "routing is assumed balanced: no recording was given (goal.routing)"


def unpriced_notes(
    launch: LaunchSettings, configuration: Configuration, spec: Spec
) -> Iterator[str]:
    """Yield notes on settings that the estimate does not price."""
    if spec.model.moe is not None and spec.routing is None:
        yield f"{NO_RECORDING}; {_balanced_by(launch)}"
    if launch.engine is not TrainingEngine.MEGATRON:
        return
    decision = to_decision(configuration, spec.model)
    rows = {row.name: row for row in MEGATRON if row.applies(spec.model, decision)}
    differing = [
        f"{said} ({rows[name].quantity}{_value(rows[name].priced)})"
        for name, said in launch.differing_settings.items()
        if name in rows
    ]
    if differing:
        yield f"the launch differs from what is priced: {'; '.join(differing)}"
    if may_deadlock(decision):
        yield DEADLOCK


def _value(priced: object) -> str:
    """Return the priced value where the words do not imply it."""
    return "" if isinstance(priced, bool) or priced is None else f": {priced}"


def _balanced_by(launch: LaunchSettings) -> str:
    if launch.engine is TrainingEngine.TORCHTITAN:
        return "torchtitan's expert bias is to balance it"
    if launch.engine is TrainingEngine.DEEPSPEED:
        return "your program's auxiliary loss is to balance it"
    if launch.balance:
        return f"{launch.balance} is to balance it"
    return (
        "nothing in the launch balances it (--moe-aux-loss-coeff is 0.0 unless given, and no "
        "expert bias is enabled): expect slower steps and more memory on the most-loaded ranks"
    )
