"""Zero-computation experts as engines run them: whose copies are computed, and by which expert.

    n experts with weights    z without    k copies of a token    a_e share of expert e among the n

Copies for experts without weights are the token itself times their weights, a sum on its own rank
(MoE++, arXiv:2410.07348; LongCat-Flash, arXiv:2509.01322). What else they cost is the engine's:

    skipped           k n / (n + z) copies are dispatched and computed, by expert e with share a_e
    to an expert      all k are, since those for the z go to expert 0 with weight 0, so that kernels
                      meet no expert that they do not know: its share is (z + a_0 n) / (n + z), that
                      of others a_e n / (n + z)

Not covered: that copies of a token for expert 0 travel as one where kernels merge those to one rank
or domain (DeepEP's normal mode), and how copies vary from token to token.

Sources: vLLM 0.33.0, fused_moe/router/zero_expert_router.py; SGLang 0.5.23,
kernels/ops/moe/ep_moe_kernels.py, `zero_experts_compute_triton`. Routing is taken as uniform over
all n + z, and by the a_e where loads were recorded.
"""

import numpy as np

from tuner.catalog.serve_rules.traits import EngineTraits
from tuner.costs.serve.decoder import Experts
from tuner.costs.serve.expert_loads import ExpertLoads


def computed_copies(experts: Experts, traits: EngineTraits) -> float:
    """Copies of a token that are dispatched and computed, mean."""
    return experts.top_k if traits.computes_zero_copies else experts.computed_top_k


def computed_loads(
    experts: Experts, traits: EngineTraits, recorded: ExpertLoads | None, *, ranks: int
) -> ExpertLoads | None:
    """Loads of the copies that are computed; None: those of the kernel tables.

    Args:
        experts: of a model, some of them without weights.
        traits: of the engine.
        recorded: loads of the experts with weights; None: even ones.
        ranks: that share the experts; where they hold unequal numbers, loads are as recorded.
    """
    if not traits.computes_zero_copies or experts.num % ranks:
        return recorded
    if recorded is None:
        share_LE = np.full((1, experts.num), 1.0 / experts.num)
        recorded = ExpertLoads(share_LE=share_LE, top_k=experts.computed_top_k)
    share_LE = recorded.share_LE * experts.num / experts.router_outputs
    share_LE[:, 0] += experts.zero / experts.router_outputs
    return ExpertLoads(
        share_LE=share_LE,
        top_k=experts.top_k,
        expert_LS=recorded.expert_LS,
        slots_R=recorded.slots_R,
    )
