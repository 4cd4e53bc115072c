"""Sampled tokens and their transitions between consecutive layers: fit, hold-out, or all.

    T tokens   K experts of a token   E experts   M = L - 1 pairs of consecutive recorded layers

Sampled tokens are in the order of passes, so where a recording has them the first ones are fit
tokens and the last ones hold-out tokens; every pair of a token's choices counts one. A recording
that keeps only sums over all passes is evaluated on what was planned from.
"""

from enum import StrEnum

import numpy as np

from solvers.placement.ranks import Floats, Ints
from tuner.errors import SpecError
from tuner.search.place.evidence import WorkloadEvidence


class Tokens(StrEnum):
    """Part of the sampled tokens."""

    FIT = "fit"
    HOLDOUT = "holdout"
    ALL = "all"


def sampled_LTK(one: WorkloadEvidence, tokens: Tokens) -> Ints:
    """Return chosen experts of sampled tokens, [L][T][K]."""
    samples_LTK = {
        Tokens.FIT: one.fit_LTK,
        Tokens.HOLDOUT: one.holdout_LTK,
        Tokens.ALL: one.recording.token_LTK,
    }[tokens]
    if samples_LTK is None:
        raise ValueError(f"{one.name!r} holds no sampled tokens")
    return np.asarray(samples_LTK, dtype=np.int64)


def has_holdout_transitions(one: WorkloadEvidence) -> bool:
    """Return whether there are hold-out tokens for transitions."""
    tokens = one.recording.token_LTK
    return tokens is not None and tokens.shape[1] > 1


def flow_MEE(one: WorkloadEvidence, tokens: Tokens) -> Floats:
    """Return the transitions of a workload, each pair of layers as shares of its token copies.

    Raises:
        SpecError: the recording holds neither transitions nor sampled tokens.
    """
    recorded_MEE = one.recording.transition_MEE
    if has_holdout_transitions(one) and (tokens is not Tokens.ALL or recorded_MEE is None):
        flow = pairs_MEE(sampled_LTK(one, tokens), one.recording.num_experts)
    elif recorded_MEE is not None:
        flow = recorded_MEE
    else:
        raise SpecError(
            f"goal.workloads: {one.name!r} holds no transitions between layers, which objective"
            " layer_chain is about; record it with `moetune profile --suite routing`"
        )
    return shares_MEE(flow)


def pairs_MEE(token_LTK: Ints, num_experts: int) -> Floats:
    """Count the pairs of choices of sampled tokens in consecutive layers."""
    flow = np.zeros((len(token_LTK) - 1, num_experts, num_experts))
    for pair_EE, here_TK, there_TK in zip(flow, token_LTK[:-1], token_LTK[1:], strict=True):
        cell = here_TK[:, :, None] * num_experts + there_TK[:, None, :]
        pair_EE += np.bincount(cell.ravel(), minlength=num_experts**2).reshape(pair_EE.shape)
    return flow


def shares_MEE(flow: Floats) -> Floats:
    """Scale every pair of layers to a sum of 1."""
    return np.asarray(flow / np.maximum(flow.sum(axis=(1, 2), keepdims=True), 1.0))
