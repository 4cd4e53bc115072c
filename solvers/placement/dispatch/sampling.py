"""Expected loads of a rule, and what whole tokens make of them.

    P passes   L layers   E experts   G ranks   S slots

A rule gives every expert's token copies to slots by shares. Which copies, chance says: the tokens
of an expert come from sources, or take replicas, independently of each other. So the n copies of
an expert fall on its ranks as a multinomial of the shares, and the largest load of a layer exceeds
the largest expected load, the more the fewer tokens a pass has.

    rule          shares
    even          equal shares (vLLM, TensorRT-LLM: in turn, so without noise)
    dynamic       equal shares
    static        near replicas first, the others assigned once a launch
    near_dynamic  near replicas first, the others equally: `dynamic` beside an all-to-all backend
    lp            of the linear program, for each pass
    near_lp       near replicas first, the others by the linear program: `lp` as SGLang runs it

Of several best splits of the program ours is the flattest; SGLang's solver stops after five steps,
at one of its own.

Not covered: tokens of one text that choose the same experts, and that every expert's count varies,
too: counts are given. Rows taken modulo the replicas (SGLang without a backend) scatter a little
less.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Final

import numpy as np

from solvers.errors import UnknownSolverError
from solvers.placement.dispatch import lp
from solvers.placement.dispatch.case import DispatchCase, split_loads
from solvers.placement.dispatch.nearest import NearShares, near_shares
from solvers.placement.ranks import Floats, Placement, Ranks

Split = Callable[[DispatchCase], Floats]
"""Share of its expert's token copies that each slot takes, `[L][S]`, or `[P][L][S]`."""

BATCH_PASSES: Final = 16
"""Linear programs solved at a time."""

MOST_KEPT: Final = 32
"""Placements whose linear programs are cached: of 16 passes of 58 layers of 288 slots 2 MB each."""


def even_split(case: DispatchCase) -> Floats:
    """Return equal shares of replicas."""
    return 1.0 / np.take_along_axis(case.copies_LE, case.placement.expert_LS, axis=1)


def expected_split(case: DispatchCase) -> Floats:
    """Return what near replicas take from their sources, and equal shares of far sources' tokens.

    True of `static` over launches and of `dynamic` beside an all-to-all backend over its draws.
    """
    return _near(case).mean_LS


def lp_split(case: DispatchCase) -> Floats:
    """Return the linear program's shares of each pass."""
    shape, packed = case.load_PLE.shape, case.load_PLE.tobytes()
    return _lp_shares(case.placement, case.ranks, shape, packed)


def near_lp_split(case: DispatchCase) -> Floats:
    """Return near sources' shares, and the linear program's of what far sources send.

    The program is blind to what is near: it splits all of an expert's tokens, and its shares are
    applied to the far ones.
    """
    shares = _near(case)
    return shares.near_LS + shares.far_LS * lp_split(case)


def _near(case: DispatchCase) -> NearShares:
    return near_shares(case.placement.expert_LS, ranks=case.ranks, num_experts=case.num_experts)


@lru_cache(maxsize=MOST_KEPT)
def _lp_shares(
    placement: Placement, ranks: Ranks, shape: tuple[int, int, int], packed: bytes
) -> Floats:
    load_PLE = np.frombuffer(packed, dtype=np.float64).reshape(shape)
    case = DispatchCase(load_PLE=load_PLE, placement=placement, ranks=ranks)
    parts = [load_PLE[at : at + BATCH_PASSES] for at in range(0, len(load_PLE), BATCH_PASSES)]
    return np.concatenate([lp.slot_splits(replace(case, load_PLE=part)) for part in parts])


SPLITS: Final[Mapping[str, Split]] = {
    "even": even_split,
    "dynamic": even_split,
    "static": expected_split,
    "near_dynamic": expected_split,
    "lp": lp_split,
    "near_lp": near_lp_split,
}
"""Shares by rule; those of `static` are expected over launches, whose own are in `launches.py`."""

PASS_BY_PASS: Final = frozenset({"lp", "near_lp"})
"""Rules whose shares follow the counts of a pass."""


def split_of(rule: str) -> Split:
    """Return a rule's shares, as expected over launches.

    Raises:
        UnknownSolverError: the rule is not one of `SPLITS`.
    """
    if rule not in SPLITS:
        raise UnknownSolverError(f"dispatch rule {rule!r} is not one of {', '.join(SPLITS)}")
    return SPLITS[rule]


def expected_loads(rule: str, case: DispatchCase) -> Floats:
    """Return the token copies that each rank expects under a rule, `[P][L][G]`.

    Raises:
        UnknownSolverError: the rule is not one of `SPLITS`.
    """
    return split_loads(case, split_of(rule)(case))
