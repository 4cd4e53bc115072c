"""How many places a token is sent to when recorded loads, not chance alone, pick its experts.

A token goes to k distinct experts; places hold blocks of consecutive experts. Where several of its
experts lie in one place, one copy is enough. With balanced routing the expected number of places is
a closed form (`distinct_places` in tuner/costs/analytic/links.py). A recording holds only how often
each expert was picked, not which were picked together, so the least is assumed beyond it: of all
distributions over k-subsets with those frequencies the one of largest entropy, in which a subset S
has probability proportional to prod_{e in S} w_e (conditional Bernoulli sampling; Chen, Dempster
and Liu, Biometrika 81, 1994). With equal loads it is the closed form.

    T_i(A)   sum over i-subsets of A of the product of their weights
    picked   w_e T_{k-1}(all but e) / T_k(all), to equal k times the expert's share of the copies
    reached  1 - T_k(all outside the place) / T_k(all)

Letters: L layers, E experts, K orders 0..k, P places. Not covered: experts that are picked together
more or less often than their loads imply; loads that k distinct experts cannot have (more than
1/k of the copies on one) are brought to the nearest that they can.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

LARGEST_RATIO: Final = 1.0 - 1e-6
"""An expert that every token picks has no finite weight."""
SMALLEST_RATIO: Final = 1e-9
CLOSE_RATIO: Final = 1e-6
"""Frequencies are met when none is off by more."""
MOST_ROUNDS: Final = 500


def selection_weights(load_LE: Floats, *, top_k: int) -> Floats:
    """Weights [L, E] under which each expert is picked as often as recorded.

    Raises:
        ValueError: top_k is not between 1 and the experts, or a layer's loads are not shares.
    """
    experts = load_LE.shape[1]
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k {top_k} must lie between 1 and the {experts} experts")
    if np.any(load_LE < 0.0) or not np.all(load_LE.sum(axis=1) > 0.0):
        raise ValueError("loads must not be negative, and not all zero in a layer")
    if top_k == experts:
        return np.ones_like(load_LE)
    picked_LE = _frequencies(load_LE, top_k=top_k)
    odds_LE = picked_LE / (1.0 - picked_LE)
    weight_LE = odds_LE
    for _ in range(MOST_ROUNDS):
        found_LE = _picked(weight_LE, top_k=top_k)
        if np.max(np.abs(found_LE - picked_LE)) < CLOSE_RATIO:
            break
        weight_LE = weight_LE * odds_LE * (1.0 - found_LE) / found_LE
        scale_L1: Floats = np.exp(np.mean(np.log(weight_LE), axis=1, keepdims=True))
        weight_LE = weight_LE / scale_L1
    return weight_LE


def busiest_places(weight_LE: Floats, *, top_k: int, places: int) -> Floats:
    """Return places x the largest chance [L] that a token needs one of them.

    This is what a padded exchange sends: as if every place were reached as often as the busiest.

    Raises:
        ValueError: the places do not divide the experts.
    """
    experts = weight_LE.shape[1]
    if experts % places:
        raise ValueError(f"{experts} experts cannot lie in {places} equal places")
    before, after = _orders_before(weight_LE, top_k), _orders_after(weight_LE, top_k)
    starts = np.arange(0, experts, experts // places)
    ends = starts + experts // places
    missed_PL: Floats = np.einsum("plk,plk->pl", before[starts], after[ends][:, :, ::-1])
    reached_PL = 1.0 - missed_PL / before[-1][:, top_k]
    busiest_L: Floats = np.clip(reached_PL.max(axis=0), 0.0, 1.0)
    return places * busiest_L


def _frequencies(load_LE: Floats, *, top_k: int) -> Floats:
    """Share of the tokens that pick each expert: sums to k, strictly between 0 and 1."""
    load_LE = load_LE / load_LE.sum(axis=1, keepdims=True) + SMALLEST_RATIO
    picked_LE: Floats = top_k * load_LE / load_LE.sum(axis=1, keepdims=True)
    full_LE = np.zeros(load_LE.shape, dtype=bool)
    while np.any(picked_LE > LARGEST_RATIO):
        full_LE |= picked_LE > LARGEST_RATIO
        left_L1 = top_k - LARGEST_RATIO * full_LE.sum(axis=1, keepdims=True)
        rest_LE = np.where(full_LE, 0.0, load_LE)
        picked_LE = left_L1 * rest_LE / rest_LE.sum(axis=1, keepdims=True)
        picked_LE = np.where(full_LE, LARGEST_RATIO, picked_LE)
    return picked_LE


def _picked(weight_LE: Floats, *, top_k: int) -> Floats:
    """Chance of every expert to be picked."""
    before, after = _orders_before(weight_LE, top_k), _orders_after(weight_LE, top_k)
    others_EL: Floats = np.einsum(
        "elk,elk->el", before[:-1, :, :top_k], after[1:, :, :top_k][:, :, ::-1]
    )
    picked_LE: Floats = weight_LE * others_EL.T / before[-1][:, top_k, None]
    return picked_LE


def _orders_before(weight_LE: Floats, top_k: int) -> Floats:
    """T_0 .. T_k of the experts before each, [E + 1, L, K]."""
    layers, experts = weight_LE.shape
    orders = np.zeros((experts + 1, layers, top_k + 1))
    orders[0, :, 0] = 1.0
    for expert in range(experts):
        orders[expert + 1] = orders[expert]
        orders[expert + 1, :, 1:] += weight_LE[:, expert, None] * orders[expert, :, :-1]
    return orders


def _orders_after(weight_LE: Floats, top_k: int) -> Floats:
    """T_0 .. T_k of the experts from each on, [E + 1, L, K]."""
    return _orders_before(weight_LE[:, ::-1], top_k)[::-1]
