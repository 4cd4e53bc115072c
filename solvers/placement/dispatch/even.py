"""Even split: each replica of an expert takes the same share of its tokens.

    load(p, l, g) = sum_e load(p, l, e) * replicas(l, e, g) / replicas(l, e)

Source:  what EPLB assumes (deepseek-ai/EPLB, README).
True of: the expectation of a uniform draw per token; no engine splits so exactly in each pass.
"""

from solvers.placement.dispatch.case import DispatchCase, split_loads
from solvers.placement.ranks import Floats


def rank_loads(case: DispatchCase) -> Floats:
    """Return token copies of each rank, `[P][L][G]`."""
    return split_loads(case, case.copies_LEG / case.copies_LE[:, :, None])
