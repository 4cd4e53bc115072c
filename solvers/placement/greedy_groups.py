"""Equal-sized groups of similar members, grown one after the other; the start of searches.

    E members   N groups of E / N

A group begins with the free member that is most similar to its nearest free members, and adds the
member most similar to all of the group until it is full. O(E^2 N log E); proves nothing.
"""

import numpy as np

from solvers.placement.ranks import Floats, Ints


def grown_groups(likeness_EE: Floats, num_groups: int) -> Ints:
    """Return the group of each member; likeness is symmetric, its diagonal is ignored."""
    num_members = len(likeness_EE)
    size = num_members // num_groups
    likeness_EE = likeness_EE.copy()
    np.fill_diagonal(likeness_EE, -np.inf)
    group_E = np.empty(num_members, dtype=np.int64)
    free_E = np.ones(num_members, dtype=bool)
    for group in range(num_groups):
        free_F = np.flatnonzero(free_E)
        among_FF = likeness_EE[np.ix_(free_F, free_F)]
        closeness_F = np.sort(among_FF, axis=1)[:, len(free_F) - size + 1 :].sum(axis=1)
        newest = free_F[closeness_F.argmax()]
        total_E = np.zeros(num_members)
        members = [newest]
        while len(members) < size:
            free_E[newest] = False
            total_E += likeness_EE[newest]
            newest = int(np.where(free_E, total_E, -np.inf).argmax())
            members.append(newest)
        free_E[newest] = False
        group_E[members] = group
    return group_E
