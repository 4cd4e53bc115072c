"""Tokens that choose experts by score less price, so that no expert is asked for too often.

    T tokens   E experts   k chosen by each token, c = k T / E places at each expert
    s          scores      x(t, e)  whether token t takes expert e

    maximise sum s x    so that   sum_e x(t, e) <= k,   sum_t x(t, e) <= c,   0 <= x <= 1

    its dual: minimise k sum p + c sum q + sum r,   p(t) + q(e) + r(t, e) >= s(t, e),   all >= 0

Method:  the dual by blocks, a sweep being p(t) = the (k+1)-th largest of s - q, then q(e) = the
         (c+1)-th largest of s - p, neither below 0; r is what is left above 0.
Proves:  any p and q >= 0 bound the score of every assignment from above (weak duality).
Source:  BIP-based balancing (arXiv:2502.15451); the sweep is ours from its formulation.
Cost:    a partial sort of T E numbers a sweep; 4 to 8 sweeps leave little.

It changes which experts a token takes, and with them what a model answers: for models that were
trained with it, and to say what balance a router's scores admit. No plan routes by it.
"""

import numpy as np

from solvers.placement.ranks import Floats, Ints


def expert_prices(score_TE: Floats, *, top_k: int, sweeps: int) -> Floats:
    """Return the price of each expert after so many sweeps; 0 sweeps: no prices."""
    tokens, experts = score_TE.shape
    places = top_k * tokens // experts
    if not 1 <= top_k < experts or places < 1:
        raise ValueError(f"{tokens} tokens that take {top_k} of {experts} experts fill no place")
    price_E = np.zeros(experts)
    for _ in range(sweeps):
        price_T = _beyond(score_TE - price_E, top_k, axis=1)
        price_E = _beyond(score_TE - price_T[:, None], places, axis=0)
    return price_E


def choices(score_TE: Floats, price_E: Floats, *, top_k: int) -> Ints:
    """Return the experts that each token takes, `[T][top_k]`, in no order."""
    return np.argpartition(price_E - score_TE, top_k - 1, axis=1)[:, :top_k]


def score_bound(score_TE: Floats, price_E: Floats, *, top_k: int) -> float:
    """Return what no assignment within all places scores more than."""
    tokens, experts = score_TE.shape
    price_T = _beyond(score_TE - price_E, top_k, axis=1)
    rest_TE = np.maximum(score_TE - price_T[:, None] - price_E, 0.0)
    places = top_k * tokens / experts
    return float(top_k * price_T.sum() + places * price_E.sum() + rest_TE.sum())


def _beyond(value_TE: Floats, count: int, *, axis: int) -> Floats:
    """The largest value behind the `count` largest along an axis, at least 0."""
    place = value_TE.shape[axis] - count - 1
    behind = np.take(np.partition(value_TE, place, axis=axis), place, axis=axis)
    return np.asarray(np.maximum(behind, 0.0))
