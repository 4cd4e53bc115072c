"""Why a target cannot launch a decision: one line per broken rule, with the way out.

The rules (tuner/engines/rules/) read only the manifests' fields, so that a release is
described in one place. Two hold everywhere: DeepEP and HybridEP, and the overlap of expert
communication, need more than one expert rank.

Not covered: what no target can do (degrees that do not divide heads, experts, layers or the batch);
that belongs to the enumeration of candidates.
"""

from tuner.engines.manifest import Capabilities
from tuner.engines.rules import structure_rules, work_rules
from tuner.engines.rules.decision import Decision
from tuner.spec.model import ModelSpec


def refusals(
    capabilities: Capabilities, *, model: ModelSpec, decision: Decision
) -> tuple[str, ...]:
    """Say why the decision cannot be launched, one line per broken rule; empty when it can."""
    return tuple(
        f"{part.names[0]}: {rule}"
        for part in capabilities.parts or (capabilities,)
        for rules in (structure_rules.broken, work_rules.broken)
        for rule in rules(part, model, decision)
    )
