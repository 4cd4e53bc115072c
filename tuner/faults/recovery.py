"""Restarts that failures interrupt: how long they take, and whether copies on hosts outlive them.

    l_c      failures per second of class c, least first; lambda their sum
    D_w      seconds of a restart after failures of which w is the worst class
    q_w      exp(-lambda D_w): no failure during it

A failure during a restart begins it again, with the worse of both classes. First-step analysis
from the worst class down, for the seconds E_w until training goes on and the chance L_w that no
copy on a host is left by then:

    E_w = (1 - q_w) (1 / lambda + sum over c of l_c / lambda * E_max(w, c))
    L_w = (1 - q_w) sum over c of l_c / lambda * L_max(w, c),   1 for classes that no copy outlives

Not covered: a second node that is lost before the first one's copy is back in its place, and held
its replica. It is one of the nodes that may fail, in the time of a restart: next to nothing beside
a share of losses that take replicas along. The simulation counts it where nodes are named.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tuner.config.columns import Numbers
from tuner.faults.levels import CLASSES, FailureClass, FailureRates

LARGEST_EXPONENT = 700.0
"""exp() of more overflows; such a restart never ends in any case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """Consequences of one failure, averaged over its class."""

    mean_s: float
    """Seconds from a failure until training goes on."""
    lost_ratio: float
    """Chance that no copy on a host is left."""
    node_mean_s: float
    """Seconds until training goes on after a failure that takes a node, of either class; the next
    field is the chance that no copy on a host is left then."""
    node_lost_ratio: float


def recovery(
    rates: FailureRates,
    restart_s: Mapping[FailureClass, float],
    *,
    survives: Mapping[FailureClass, bool],
) -> Recovery:
    """Solve the chain.

    Args:
        rates: of the job.
        restart_s: by the worst class.
        survives: classes that copies on hosts outlive; never a worse one than one that they do not.
    """
    rate = rates.per_s
    shares = {kind: rates.of(kind) / rate for kind in CLASSES}
    seconds: dict[FailureClass, float] = {}
    lost: dict[FailureClass, float] = {}
    for place in reversed(range(len(CLASSES))):
        kind, worse = CLASSES[place], CLASSES[place + 1 :]
        exponent = min(rate * restart_s[kind], LARGEST_EXPONENT)
        interrupted = -math.expm1(-exponent)
        # Also 1 - interrupted * (share of this class and better ones), without a difference.
        leaves = math.exp(-exponent) + interrupted * sum(shares[worse_kind] for worse_kind in worse)
        seconds[kind] = (
            interrupted
            * (1.0 / rate + sum(shares[worse_kind] * seconds[worse_kind] for worse_kind in worse))
            / leaves
        )
        lost[kind] = (
            interrupted
            * sum(shares[worse_kind] * lost[worse_kind] for worse_kind in worse)
            / leaves
            if survives[kind]
            else 1.0
        )
    together = shares[FailureClass.TOGETHER]
    nodes = shares[FailureClass.NODE] + together
    # Shares of the classes among failures that take a node.
    of_node = {
        FailureClass.NODE: shares[FailureClass.NODE] / nodes if nodes else 1.0,
        FailureClass.TOGETHER: together / nodes if nodes else 0.0,
    }
    return Recovery(
        mean_s=sum(shares[kind] * seconds[kind] for kind in CLASSES),
        lost_ratio=sum(shares[kind] * lost[kind] for kind in CLASSES),
        node_mean_s=sum(share * seconds[kind] for kind, share in of_node.items()),
        node_lost_ratio=sum(share * lost[kind] for kind, share in of_node.items()),
    )


def equal_restart_s(
    *,
    process_per_s: Numbers,
    loss_per_s: Numbers,
    process_restart_s: Numbers,
    restart_s: Numbers,
) -> Numbers:
    """Return the restart that, the same after every failure, costs what these two do.

    With E seconds on average from a failure on, exp(lambda R) = 1 + lambda E.

    Args:
        process_per_s: failures of processes alone.
        loss_per_s: failures that take a node.
        process_restart_s: after the former; one that a lost node interrupts takes `restart_s`.
        restart_s: after the latter.
    """
    rate = process_per_s + loss_per_s
    worse = np.asarray(loss_per_s / rate, dtype=np.float64)
    longer = np.expm1(np.minimum(rate * restart_s, LARGEST_EXPONENT))
    exponent = np.minimum(rate * process_restart_s, LARGEST_EXPONENT)
    interrupted = -np.expm1(-exponent)
    shorter = interrupted * (1.0 + worse * longer) / (np.exp(-exponent) + interrupted * worse)
    equal_s = np.log1p((1.0 - worse) * shorter + worse * longer) / rate
    return float(equal_s) if np.ndim(equal_s) == 0 else equal_s
