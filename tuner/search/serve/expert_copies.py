"""Redundant experts that are tried for an instance, and the loads of its ranks with them.

    E experts    C copies    R expert ranks    (E + C) / R slots of a rank

    fewest        the least C that makes slots even: none where R divides E
    one more      R copies beyond that, a slot more on every rank, tried where loads were recorded
                  and the most-loaded rank gets less to do by `LEAST_GAIN`

Copies go where DeepSeek's EPLB puts them for the recorded loads, as the engines' own balancers do
that the launch switches on (SGLang 0.5.23 eplb/eplb_algorithms, vLLM 0.33.0
distributed/eplb/policy/default.py); TensorRT-LLM's moves replicas by a rule of its own and is taken
to be as good. A placement that the goal names has its own ranks and slots. Without a recording
copies are tried for even slots alone, and even experts are placed: of 288 slots on 72 ranks 64 hold
halves of an expert, so that some rank has four whole ones, 1.125 times the mean.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from solvers.placement.balance.eplb import eplb
from solvers.placement.ranks import Ranks
from tuner.costs.serve.decoder import Experts
from tuner.costs.serve.expert_loads import ExpertLoads
from tuner.spec.serving.expert_slots import are_even, fewest_redundant

MOST_RATIO: Final = 0.5
"""Copies over experts, at most: more take memory that levels nothing further."""
LEAST_GAIN: Final = 0.02
"""Share of the most-loaded rank's tokens that copies must take off it to be worth a try."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertCopies:
    """Loads by ranks and copies."""

    loads: ExpertLoads | None = None
    """Recorded; None: those of the kernel tables."""
    groups: int = 1
    """Groups of experts that the router knows, which EPLB keeps on nodes where they divide."""
    is_launched: bool = False
    """The engine's release keeps copies of this model's experts."""
    placed: dict[tuple[int, int, int], ExpertLoads] = field(default_factory=dict)
    """Loads by ranks, nodes and copies; filled on use."""

    def solve_and_simulate(
        self, experts: Experts, *, ranks: int, nodes: int
    ) -> Iterator[tuple[int, ExpertLoads | None]]:
        """Yield numbers of redundant experts for an instance, with the loads of its ranks.

        Args:
            experts: of the model.
            ranks: that share them.
            nodes: that hold the ranks.
        """
        named = self._named(ranks)
        if named is not None:
            yield named.num_slots - experts.num, named
            return
        fewest = fewest_redundant(experts.num, ranks)
        if not self._is_tried(fewest, experts):
            return
        plain = self.borne(experts, ranks=ranks, nodes=nodes, redundant=fewest)
        yield fewest, plain
        more = fewest + ranks
        if self.loads is None or plain is None or ranks == 1 or not self._is_tried(more, experts):
            return
        levelled = self.borne(experts, ranks=ranks, nodes=nodes, redundant=more)
        assert levelled is not None  # as slots are even
        if levelled.expert_imbalance(ranks) <= (1.0 - LEAST_GAIN) * plain.expert_imbalance(ranks):
            yield more, levelled

    def borne(
        self, experts: Experts, *, ranks: int, nodes: int, redundant: int
    ) -> ExpertLoads | None:
        """Return the loads of ranks with so many copies; None where those of the tables count.

        A placement for other ranks or slots is left out. Without a recording copies are taken to
        level loads as far as even experts can be in so many slots.
        """
        named = self._named(ranks)
        if named is not None and redundant in (0, named.num_slots - experts.num):
            return named
        if redundant:
            key = (ranks, nodes, redundant)
            if not are_even(experts.num, redundant, ranks):
                return None
            if key not in self.placed:
                self.placed[key] = self._placed(
                    experts, ranks=ranks, nodes=nodes, redundant=redundant
                )
            return self.placed[key]
        if self.loads is None:
            return None
        unplaced = self.loads.placed()
        return unplaced if unplaced.fits(ranks) else None

    def _named(self, ranks: int) -> ExpertLoads | None:
        """Return the loads under the goal's own placement where it is for so many ranks."""
        loads = self.loads
        is_named = loads is not None and loads.expert_LS is not None and ranks > 1
        return loads if loads is not None and is_named and loads.fits(ranks) else None

    def _is_tried(self, redundant: int, experts: Experts) -> bool:
        return not redundant or (self.is_launched and redundant <= MOST_RATIO * experts.num)

    def _placed(self, experts: Experts, *, ranks: int, nodes: int, redundant: int) -> ExpertLoads:
        loads = self.loads or ExpertLoads(
            share_LE=np.full((1, experts.num), 1.0 / experts.num), top_k=experts.computed_top_k
        )
        placement = eplb(
            loads.share_LE,
            ranks=Ranks.uniform(
                ranks=ranks,
                slots_per_rank=(experts.num + redundant) // ranks,
                ranks_per_node=ranks // nodes if ranks % nodes == 0 else ranks,
            ),
            num_groups=self.groups,
        )
        return loads.placed(np.array(placement.expert_LS))
