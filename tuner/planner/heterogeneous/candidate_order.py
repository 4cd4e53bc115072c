"""All decisions that were found over pools, in one order, with more room searched for where short.

Chains over pools are played pass by pass and stand beside what each pool does alone. Where the best
chain may run out of memory, chains with more room are searched for and ranked with the others.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tuner.planner.analytic.memory_risk import SMALL
from tuner.planner.analytic.preference import TOLERANCE_RATIO
from tuner.planner.heterogeneous.certificate import fastest_of
from tuner.planner.heterogeneous.chains import Chain
from tuner.planner.heterogeneous.headroom_search import roomy_search
from tuner.planner.heterogeneous.risk import Decided, Priced, fastest_with_room, in_order, priced
from tuner.planner.heterogeneous.search import Search, Settings
from tuner.planner.heterogeneous.single_pool import DecisionAlone, PoolAlone
from tuner.planner.heterogeneous.to_plan import Played, played
from tuner.planner.progress import Told, Watch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ranking:
    """All that was found, with its risks."""

    order: list[Decided]
    """Best first; what runs out more likely than not comes last."""
    risks: Mapping[Decided, Priced]
    complete_s: float | None
    """Seconds of a step up to which everything that hardly runs out was searched for; infinite
    where all was. None where it was not asked for."""

    @property
    def best(self) -> Decided | None:
        """What is planned; None where nothing fits.

        A chain on one pool alone gives way to what the search of that pool found and is about as
        fast, as long as that is as likely to fit: the pool's own planner moves its layers too.
        """
        if not self.order:
            return None
        best, *others = self.order
        if not isinstance(best, Played) or is_over_several(best):
            return best
        most_s = self.risks[best].effective_s * (1.0 + TOLERANCE_RATIO)
        for one in others:
            risk = self.risks[one]
            if _is_alone_on(one, best) and risk.is_fit and risk.effective_s <= most_s:
                return one
        return best

    @property
    def chains(self) -> list[Played]:
        """Chains in the same order."""
        return [one for one in self.order if isinstance(one, Played)]


def is_over_several(one: Played) -> bool:
    """Whether a chain runs on more than one pool."""
    return len(set(one.chain.pool_S)) > 1


def _is_alone_on(one: Decided, chain: Played) -> bool:
    return isinstance(one, DecisionAlone) and one.index == chain.chain.pool_S[0]


def ranked(
    found: Search, settings: Settings, *, alone: Sequence[PoolAlone], watch: Watch
) -> Ranking:
    """Play the chains that were found, search for more room where it is short, and order all."""
    question = found.question
    every: list[Decided] = [one for pool in alone for one in pool.decisions]
    every += [played(chain) for chain in found.chains]
    risks = priced(every, question)
    ranking = Ranking(order=in_order(risks), risks=risks, complete_s=None)
    alone_s = min(pool.complete_s for pool in alone)
    if not ranking.chains:
        return replace(ranking, complete_s=min(found.complete_s, alone_s))
    first, fastest = ranking.chains[0], fastest_of(ranking.chains)
    is_near = first.objective_s <= fastest.objective_s * (1.0 + TOLERANCE_RATIO)
    full = first if is_near else fastest
    if risks[full].chance <= SMALL:
        return ranking
    watch(Told(stage="memory", text="searching for chains with more room"))
    known = fastest_with_room(risks)
    known_s = math.inf if known is None else known.objective_s
    rooms = roomy_search(found, settings, full=full, known_s=known_s)
    if rooms is None:
        return ranking
    keys = {_key(one.chain) for one in ranking.chains}
    more = {_key(chain): chain for chain in rooms.chains if _key(chain) not in keys}
    risks = priced([*every, *(played(chain) for chain in more.values())], question)
    return Ranking(order=in_order(risks), risks=risks, complete_s=min(rooms.complete_s, alone_s))


def _key(chain: Chain) -> tuple[object, ...]:
    """What a chain decides."""
    candidate = chain.column.candidate
    columns = (*candidate.rows.values(), *candidate.ways.values())
    return chain.pool_S, chain.layers_S, tuple(int(column[0]) for column in columns)
