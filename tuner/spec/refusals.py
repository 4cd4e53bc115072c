"""Reasons why a target cannot launch a decision: a line per broken rule, with the way out.

The rules (tuner/catalog/rules/) read only the manifests' fields, so that a release is
described in one place. Two hold everywhere: DeepEP and HybridEP, and the overlap of expert
communication, need more than one expert rank.

Not covered: what no target can do (degrees that do not divide heads, experts, layers or the batch);
that belongs to the enumeration of candidates.
"""

from collections.abc import Iterator

from tuner.catalog.manifest import Capabilities, restrict
from tuner.catalog.rules import structure_rules, work_rules
from tuner.config.train import TrainDecision
from tuner.spec.features import features
from tuner.spec.model import ModelSpec


def refusals(
    capabilities: Capabilities, *, model: ModelSpec, decision: TrainDecision
) -> tuple[str, ...]:
    """Say why the decision cannot be launched, one line per broken rule; empty when it can."""
    return tuple(
        f"{part.names[0]}: {rule}"
        for part in capabilities.parts or (capabilities,)
        for rule in dict.fromkeys(_named(part, model, decision))
    )


def _named(target: Capabilities, model: ModelSpec, decision: TrainDecision) -> Iterator[str]:
    """Yield the broken rules; those that hold for adapters alone say so."""
    broken = tuple(_broken(target, model, decision))
    whole = target.without_adapters
    always = broken if whole is None else tuple(_broken(whole, model, decision))
    yield from (line if line in always else f"{line} beside adapters" for line in broken)


def _broken(target: Capabilities, model: ModelSpec, decision: TrainDecision) -> Iterator[str]:
    """Yield the broken rules; those of a restriction name its feature."""
    said = list(_rules(target, model, decision))
    yield from said
    present = features(model)
    for restriction in sorted(target.restrictions, key=lambda rule: rule.feature):
        if restriction.feature not in present:
            continue
        narrower = _rules(restrict(target, restriction.limits), model, decision)
        yield from (f"{line}, with {restriction.feature}" for line in narrower if line not in said)
        said += narrower


def _rules(target: Capabilities, model: ModelSpec, decision: TrainDecision) -> tuple[str, ...]:
    return (
        *structure_rules.broken(target, model, decision),
        *work_rules.broken(target, model, decision),
    )
