"""Cost of a token copy into a domain and to a rank where it is sent once to each.

    G ranks   J groups of a level

Tokens start evenly on all ranks. A token is sent once to each domain that it needs, then once to
each rank that it needs there. So a copy into group j of a level costs the mean over the ranks s
that it may come from

    domain j    sum over s outside j of the mean cost(s, g) over g in j, over G
    rank j      sum over s of its domain of cost(s, j), over the ranks of the domain

which is nothing from j itself. So a slow link makes both of its endpoints more expensive. With
`busiest` the group that receives most counts instead of all, as in HierMoE's padded two-hop
all-to-all.
"""

from typing import Final

import numpy as np

from solvers.placement.coactivation.problem import Level
from solvers.placement.ranks import Floats, Ints
from tuner.search.place.links import LinkCosts

LEAST_WEIGHT: Final = 1e-6
"""Weight of a group that costs nothing to reach, relative to the others."""


def link_levels(links: LinkCosts, *, is_peak: bool) -> tuple[Level, ...]:
    """Return domains and ranks with what a token copy to each costs, relative as `links` are."""
    group_G = np.arange(len(links.domain_G), dtype=np.int64)
    levels = [
        _level(links.domain_G, _domain_costs(links), is_peak=is_peak),
        _level(group_G, _rank_costs(links), is_peak=is_peak),
    ]
    priced_levels = tuple(level for level in levels if level is not None)
    # One rank: every placement costs the same, but a level is required.
    return priced_levels or (Level(group_G=group_G, total_cost=0.0),)


def _level(group_G: Ints, cost_J: Floats, *, is_peak: bool) -> Level | None:
    usual = float(np.median(cost_J))
    usual = usual if usual > 0.0 else float(cost_J.max())
    if usual <= 0.0:
        return None
    weight_J = np.maximum(cost_J / usual, LEAST_WEIGHT)
    return Level(
        group_G=group_G.copy(),
        total_cost=0.0 if is_peak else usual,
        peak_cost=usual if is_peak else 0.0,
        weight_J=None if np.allclose(weight_J, 1.0, rtol=1e-9) else weight_J,
    )


def _domain_costs(links: LinkCosts) -> Floats:
    domain_G = links.domain_G
    in_domain_JG = domain_G == np.arange(int(domain_G.max()) + 1)[:, None]
    to_JG = np.stack([links.cost_GG[:, is_in_G].mean(axis=1) for is_in_G in in_domain_JG])
    return np.asarray(np.where(in_domain_JG, 0.0, to_JG).sum(axis=1) / len(domain_G))


def _rank_costs(links: LinkCosts) -> Floats:
    same_GG = links.domain_G[:, None] == links.domain_G
    inside_GG = np.where(same_GG, links.cost_GG, 0.0)
    return np.asarray(inside_GG.sum(axis=0) / same_GG.sum(axis=0))
