"""Dynamic dispatch: which replica takes a token copy depends on the token alone, not on loads.

Engines take the replica at random, or by the token's row modulo the number of replicas; the rows
that choose an expert are as good as random. So the tokens of an expert with r replicas fall on them
as a multinomial of r equal chances, and the loads of a pass scatter around the even split by about
sqrt(load / r) a replica: little for a prefill, much for a decode step.

Source:  SGLang 0.5.23, `--ep-dispatch-algorithm dynamic` without an all-to-all backend
         (sglang/srt/eplb/expert_location_dispatch.py).
Not covered: the flag with an all-to-all backend, where near replicas come first (static.py).
"""

import numpy as np

from solvers.placement.dispatch.case import DispatchCase
from solvers.placement.ranks import Floats


def rank_loads(case: DispatchCase) -> Floats:
    """Return one draw of token copies of each rank, `[P][L][G]`.

    Raises:
        ValueError: a load is no whole number of tokens.
    """
    tokens_PLE = np.rint(case.load_PLE).astype(np.int64)
    if not np.array_equal(tokens_PLE, case.load_PLE):
        raise ValueError("dynamic dispatch draws whole tokens: pass counts, or use `even`")
    rng = np.random.default_rng(case.seed)
    load_PLS = np.empty((len(tokens_PLE), case.num_layers, case.ranks.num_slots))
    for layer, (expert_S, copies_E) in enumerate(
        zip(case.placement.expert_LS, case.copies_LE, strict=True)
    ):
        order_S = np.argsort(expert_S, kind="stable")
        first_E = np.concatenate(([0], np.cumsum(copies_E)[:-1]))
        for copies in np.unique(copies_E):
            chosen_E = np.flatnonzero(copies_E == copies)
            slots = order_S[first_E[chosen_E][:, None] + np.arange(copies)]
            chances = np.full(copies, 1.0 / copies)
            load_PLS[:, layer, slots] = rng.multinomial(tokens_PLE[:, layer, chosen_E], chances)
    first_G = case.ranks.first_slot_G
    loads: Floats = np.add.reduceat(load_PLS, first_G, axis=2)
    return loads
