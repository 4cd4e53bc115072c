"""Recorded shares of experts, and the load of the most-loaded rank under a placement.

    p_e = min(1, k share_e / c_e)   a token's chance to reach one of the c_e copies of expert e
    max_load(R)     = mean over layers of R times the largest rank's share of token copies
    activated(m, R) = mean over layers of the largest over ranks of sum over its slots of
                      1 - (1 - p_e)^m     distinct experts that m tokens make a rank read

A replica takes an equal part of its expert's tokens. Layers that were not recorded are taken to be
like the mean of those that were.

    kernel(m) = balanced(m') rated(activated(m), m') / rated(even(m'), m')     m' = max_load(R) m

The kernel is the measured one of evenly loaded experts at the tokens of the most-loaded rank, times
what the datasheet says of reading other experts than those tokens would reach under equal shares,
even(m') = E / R (1 - (1 - k / E)^m'). Equal shares in order of ids give the balanced kernel itself.
Even loads cannot take longer than uneven ones; where a table says so all the same (SGLang's and
vLLM's of many ranks, which hold work on the copies of others), the uneven one counts.

Source: the form of activated experts is Janus' (arXiv:2512.13525) with recorded shares instead of
equal ones; tokens are taken to choose independently of each other.
Valid: tokens of one step drawn like the recording's. The largest of means stands for the mean of
the largest, so chance fluctuations between ranks are left to the kernel that is scaled.

Letters: L recorded layers, E experts, S slots, R ranks.
"""

from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from tuner.prices.ops import Op
from tuner.prices.serve.curves import Floats
from tuner.prices.serve.machine import BALANCED, LOAD, ServingMachine
from tuner.prices.serve.work import even_activated

Ints = npt.NDArray[np.int64]

LOG_TOKENS: Final = np.log(np.geomspace(1.0, 2.0**20, 81))
"""Logarithms of the token counts at which activated experts are counted; between them they are
interpolated."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertLoads:
    """Shares of a layer's token copies by expert, and the slots that hold the experts.

    Raises:
        ValueError: shapes disagree, a share is negative, or an expert has no slot.
    """

    share_LE: Floats
    """Share of a layer's token copies that each expert gets; each row sums to 1."""
    top_k: float
    """Copies of a token among these shares, mean."""
    expert_LS: Ints | None = None
    """Expert of each slot, rank by rank; None: in order of ids, one slot each."""
    slots_R: tuple[int, ...] = ()
    """Slots of each rank of `expert_LS`; empty: equally many."""
    known_activated: dict[int, Floats] = field(default_factory=dict)
    """Logarithms of activated experts at `LOG_TOKENS`, by number of ranks; filled on use."""
    known_ratios: dict[int, float] = field(default_factory=dict)
    """Tokens of the most-loaded rank over those of the mean, by number of ranks; filled on use."""

    def __post_init__(self) -> None:
        share = self.share_LE
        if share.ndim != 2 or 0 in share.shape or (share < 0.0).any():
            raise ValueError("shares are [layers][experts], none empty or negative")
        if not np.allclose(share.sum(axis=1), 1.0, atol=1e-6):
            raise ValueError("the shares of each layer must sum to 1")
        if not 0 < self.top_k <= share.shape[1]:
            raise ValueError(f"top_k {self.top_k} must lie in 0..{share.shape[1]}")
        share.setflags(write=False)
        if self.expert_LS is None:
            return
        layers, experts = share.shape
        if self.expert_LS.ndim != 2 or len(self.expert_LS) != layers:
            raise ValueError(f"slots of {len(self.expert_LS)} layers, {layers} recorded")
        if any(set(row) != set(range(experts)) for row in self.expert_LS.tolist()):
            raise ValueError(f"every layer must hold each of {experts} experts in some slot")
        if self.slots_R and sum(self.slots_R) != self.expert_LS.shape[1]:
            raise ValueError(
                f"{sum(self.slots_R)} slots of ranks, {self.expert_LS.shape[1]} in all"
            )
        self.expert_LS.setflags(write=False)

    @property
    def num_slots(self) -> int:
        """Experts that a layer holds, copies counted."""
        return int((self.share_LE if self.expert_LS is None else self.expert_LS).shape[1])

    def placed(self, expert_LS: Ints | None = None) -> "ExpertLoads":
        """Return the same loads in other slots, equally many a rank; None: in order of ids."""
        return ExpertLoads(share_LE=self.share_LE, top_k=self.top_k, expert_LS=expert_LS)

    def fits(self, ranks: int) -> bool:
        """Return whether slots are distributed to so many ranks."""
        if self.slots_R:
            return ranks in (1, len(self.slots_R))
        return self.num_slots % ranks == 0

    def expert_imbalance(self, ranks: int) -> float:
        """Tokens of the most-loaded rank over those of the mean, averaged over layers."""
        if ranks not in self.known_ratios:
            load_LR = self._by_rank(self._slot_share_LS(), ranks)
            self.known_ratios[ranks] = float(np.mean(load_LR.max(axis=1)) * ranks)
        return self.known_ratios[ranks]

    def activated(self, tokens_Q: Floats, ranks: int) -> Floats:
        """Distinct experts that the most-loaded rank reads for so many tokens, mean of layers."""
        if ranks not in self.known_activated:
            reach_LS = np.minimum(self.top_k * self._slot_share_LS(), 1.0)
            with np.errstate(divide="ignore"):
                log_unread_LS = np.log1p(-reach_LS)
            self.known_activated[ranks] = np.log(
                [
                    self._by_rank(-np.expm1(tokens * log_unread_LS), ranks).max(axis=1).mean()
                    for tokens in np.exp(LOG_TOKENS)
                ]
            )
        log_tokens_Q = np.log(np.maximum(tokens_Q, 1.0))
        return np.asarray(np.exp(np.interp(log_tokens_Q, LOG_TOKENS, self.known_activated[ranks])))

    def _slot_share_LS(self) -> Floats:
        if self.expert_LS is None:
            return self.share_LE
        layer_L = np.arange(len(self.share_LE))[:, None]
        copies_LE = np.zeros_like(self.share_LE)
        np.add.at(copies_LE, (layer_L, self.expert_LS), 1.0)
        return np.asarray((self.share_LE / copies_LE)[layer_L, self.expert_LS])

    def _by_rank(self, value_LS: Floats, ranks: int) -> Floats:
        if not self.fits(ranks):
            raise ValueError(f"{self.num_slots} slots cannot be dealt out to {ranks} ranks")
        if self.slots_R and ranks > 1:
            starts_R = np.concatenate([[0], np.cumsum(self.slots_R)[:-1]])
            return np.asarray(np.add.reduceat(value_LS, starts_R, axis=1))
        layers = len(value_LS)
        return np.asarray(value_LS.reshape(layers, ranks, -1).sum(axis=2))


def loaded_experts_s(machine: ServingMachine, routed: Op, *, loads: ExpertLoads) -> Floats:
    """Routed experts on the most-loaded rank, for tokens over all ranks that share them."""
    expert, tokens_Q = int(routed.axes["expert"]), np.asarray(routed.axes["tokens"])
    dispatched, slash, _ = routed.kind.rpartition("/")
    handled_Q = routed.axes.get("handled", tokens_Q)
    most_loaded_Q = np.asarray(tokens_Q * loads.expert_imbalance(expert))
    even, uneven = (
        replace(
            routed,
            kind=f"{dispatched}{slash}{load}",
            axes={**routed.axes, "tokens": most_loaded_Q, "handled": handled_Q},
        )
        for load in (BALANCED, LOAD)
    )
    kernel_Q = np.minimum(machine.seconds(even), machine.seconds(uneven))
    read_Q = loads.activated(tokens_Q, expert)
    rated_Q = machine.rated_experts_s(even, reached_Q=read_Q)
    uniform_Q = machine.rated_experts_s(even, reached_Q=even_activated(even))
    return np.asarray(kernel_Q * rated_Q / uniform_Q)
