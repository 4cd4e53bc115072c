"""Ranks or domains that one token reaches under group-limited routing.

DeepSeek-V2, DeepSeek-V3 and models after them cut the E experts into G equal groups, choose g of
them for each token by the best scores in each, and its k experts from those (arXiv:2405.04434,
section 2.1.3, device-limited routing; arXiv:2412.19437, section 2.1.2, node-limited routing). A
group chosen for its best expert nearly always holds one of the k, so the model puts one expert into
each of the g groups and the other k - g anywhere in them. Experts are placed in order; with P
places (ranks or domains)

    P >= G    a group covers P / G places, and a place holds x = E / P experts of one group:
              reached = P g/G (1 - (1 - x G / E) C(n - x, k - g) / C(n, k - g)),  n = g E / G - g
    P < G     a place holds a = G / P whole groups:
              reached = P (1 - C(G - a, g) / C(G, g))

Where P does not divide G, places hold floor(a) or ceil(a) groups, weighted so that a is the mean;
with g > k only k groups count. Unlimited routing reaches `distinct_places` (links.py), which caps
the above. Against a simulation of DeepSeek-V3's router with independent scores the mean is
within 1.5 % for every number of places (test_limited_routing.py).

Letters: C columns. Not covered: groups that recorded routing prefers.
"""

import numpy as np

from tuner.config.columns import Numbers
from tuner.config.shapes import ModelShape
from tuner.prices.train.collectives import distinct_places


def reached_places(model: ModelShape, places: Numbers) -> Numbers:
    """Expected number of places that hold at least one of a token's experts."""
    plain = distinct_places(places, model.experts, model.top_k)
    is_limited = np.less(model.groups_per_token, model.num_groups)
    if not np.any(is_limited):
        return plain
    return np.where(is_limited, np.minimum(_limited(model, places), plain), plain)


def _limited(m: ModelShape, places: Numbers) -> Numbers:
    count, chosen = m.num_groups, np.minimum(m.groups_per_token, m.top_k)
    here = m.experts / places
    others = m.experts / count * chosen - chosen
    missed = np.clip(1.0 - here * count / m.experts, 0.0, 1.0)
    missed = missed * _missed(others, here, m.top_k - chosen)
    groups_per_place = count / places
    whole = np.floor(groups_per_place)
    more = groups_per_place - whole
    idle = (1.0 - more) * _missed(count, whole, chosen) + more * _missed(count, whole + 1.0, chosen)
    wide = places * chosen / count * (1.0 - missed)
    return np.where(np.greater_equal(places, count), wide, places * (1.0 - idle))


def _missed(among: Numbers, here: Numbers, draws: Numbers) -> Numbers:
    """Probability that no draw without replacement hits an expert of this place."""
    missed: Numbers = 1.0
    for drawn in range(int(np.max(draws))):
        miss = np.clip(1.0 - here / np.maximum(among - drawn, 1.0), 0.0, 1.0)
        missed = np.where(drawn < draws, missed * miss, missed)
    return missed
