"""Expected loads of a rule, and what whole tokens make of them.

    P passes   L layers   E experts   G ranks

A rule gives every expert's token copies to ranks by shares. Which copies, chance says: the tokens
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
from typing import Final

import numpy as np

from solvers.errors import UnknownSolverError
from solvers.placement.dispatch import kept, lp
from solvers.placement.dispatch.case import DispatchCase, split_loads
from solvers.placement.dispatch.kept import by_rank
from solvers.placement.dispatch.nearest import expected_split, near_and_far
from solvers.placement.ranks import Floats

Split = Callable[[DispatchCase], Floats]
"""Shares of each expert's token copies by rank, `[L][E][G]`, of a case of one pass."""


def even_split(case: DispatchCase) -> Floats:
    """Return equal shares of replicas."""
    return case.copies_LEG / case.copies_LE[:, :, None]


def near_lp_split(case: DispatchCase) -> Floats:
    """Return near sources' shares, and the linear program's of what far sources send.

    The program is blind to what is near: it splits all of an expert's tokens, and its shares are
    applied to the far ones.
    """
    near_LEG, far_LE = near_and_far(case)
    return near_LEG + far_LE[:, :, None] * lp_split(case)


def lp_split(case: DispatchCase) -> Floats:
    """Return the linear program's shares.

    Raises:
        ValueError: the case has more than one pass.
    """
    if len(case.load_PLE) != 1:
        raise ValueError("shares are of one pass")
    return by_rank(case, _lp_shares(case)[0])


def _lp_shares(case: DispatchCase) -> list[Floats]:
    """Return the linear program's shares of each pass by slot, solving those that are not kept."""
    keys = [kept.key_of(case, of="lp", load_LE=load_LE) for load_LE in case.load_PLE]
    shares_by_pass = [kept.kept(key) for key in keys]
    missing = [place for place, share_LS in enumerate(shares_by_pass) if share_LS is None]
    for start in range(0, len(missing), BATCH_PASSES):
        places = missing[start : start + BATCH_PASSES]
        solved = lp.slot_splits(replace(case, load_PLE=case.load_PLE[places]))
        for place, share_LS in zip(places, solved, strict=True):
            shares_by_pass[place] = kept.keep(keys[place], share_LS.copy())
    return [share_LS for share_LS in shares_by_pass if share_LS is not None]


BATCH_PASSES: Final = 16
"""Linear programs solved at a time."""


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


def expected_loads(rule: str, case: DispatchCase) -> Floats:
    """Return the token copies that each rank expects under a rule, `[P][L][G]`.

    Raises:
        UnknownSolverError: the rule is not one of `SPLITS`.
    """
    shares = split_of(rule)
    if rule not in PASS_BY_PASS:
        one_pass = replace(case, load_PLE=case.load_PLE[:1])
        return split_loads(case, shares(one_pass))
    _lp_shares(case)
    return np.stack([_one_pass(one, shares(one)) for one in _passes(case)])


def draw(case: DispatchCase, split_LEG: Floats, rng: np.random.Generator) -> Floats:
    """Return the token copies of each rank, `[L][G]`, of one draw by the given shares.

    Raises:
        ValueError: the case has more than one pass, or a load is no whole number of tokens.
    """
    if len(case.load_PLE) != 1:
        raise ValueError("a draw is of one pass")
    tokens_LE = np.rint(case.load_PLE[0]).astype(np.int64)
    if not np.array_equal(tokens_LE, case.load_PLE[0]):
        raise ValueError("replicas are drawn for whole tokens: pass counts, or use `even`")
    is_split_LE = case.copies_LE > 1
    load_LG = _one_pass(case, split_LEG * ~is_split_LE[:, :, None])
    for layer, is_split_E in enumerate(is_split_LE):
        shares_EG = np.maximum(split_LEG[layer, is_split_E], 0.0)
        shares_EG /= shares_EG.sum(axis=1, keepdims=True)
        load_LG[layer] += rng.multinomial(tokens_LE[layer, is_split_E], shares_EG).sum(axis=0)
    return load_LG


def split_of(rule: str) -> Split:
    """Return a rule's shares, as expected over launches.

    Raises:
        UnknownSolverError: the rule is not one of `SPLITS`.
    """
    if rule not in SPLITS:
        raise UnknownSolverError(f"dispatch rule {rule!r} is not one of {', '.join(SPLITS)}")
    return SPLITS[rule]


def _passes(case: DispatchCase) -> list[DispatchCase]:
    return [replace(case, load_PLE=load_LE[None]) for load_LE in case.load_PLE]


def _one_pass(one: DispatchCase, split_LEG: Floats) -> Floats:
    loads: Floats = np.matmul(one.load_PLE[0][:, None, :], split_LEG)[:, 0]
    return loads
