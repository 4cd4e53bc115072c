"""The header of every emitted placement, or its README: what it is and the evidence for it."""

from tuner.plans.place import VerifiedPlacement
from tuner.units import spans


def brief_statement(verified: VerifiedPlacement) -> tuple[str, ...]:
    """Return the lines of a file beside the one that is started."""
    decision, plan = verified.decision, verified.plan
    slots = sorted(set(decision.slots_per_rank))
    return (
        f"Written by moetune {plan.provenance.moetune_version} for MoE layers"
        f" {spans(decision.layer_ids)}: {decision.num_experts} experts in {decision.num_slots}"
        f" slots on {decision.num_devices} ranks of {' or '.join(map(str, slots))}.",
        *(
            f"Made for {mark.words}: plan again when one of these changes."
            for mark in plan.made_for
        ),
        *((f"NOT VERIFIED: {verified.waived}",) if verified.waived else ()),
    )


def statement(verified: VerifiedPlacement) -> tuple[str, ...]:
    """Return the lines; an unmeasured placement says so.

    Verdict and expected loads are left out where they were evaluated under another dispatch rule
    than the engine's.
    """
    plan, lines = verified.plan, list(brief_statement(verified))
    if not all(mark.is_judged for mark in plan.made_for):
        lines.append(
            "NOT EVALUATED for this engine: the plan's verdict and expected loads are for another"
            " dispatch rule than the one it runs."
        )
        return tuple(lines)
    if plan.verdict is not None:
        lines.append(f"Verdict: {plan.verdict.word}. {plan.verdict.reason}")
    if plan.predicted is not None:
        lines += [
            f"Expected of workload {name}: largest rank load {ratio:.3f} of the mean."
            for name, ratio in plan.predicted.imbalance.items()
        ]
    return tuple(lines)
