"""Instances for tests and benchmarks: tiny random ones, and large ones with latent topics.

L layers, T tokens, K experts of a token, E experts, G ranks.
"""

import numpy as np

from solvers.placement.coactivation.problem import CoactivationProblem, Level
from solvers.placement.ranks import Ints, Ranks


def rank_and_node_levels(
    ranks: Ranks, *, node: float = 6.0, rank: float = 1.0
) -> tuple[Level, ...]:
    """Return two levels that count copies: into nodes over the network, then into ranks."""
    return (
        Level(group_G=ranks.node_G.copy(), total_cost=node),
        Level(group_G=np.arange(ranks.num_ranks), total_cost=rank),
    )


def with_topics(
    rng: np.random.Generator,
    *,
    num_layers: int,
    num_tokens: int,
    num_chosen: int,
    num_experts: int,
    ranks: Ranks,
    preference: float = 3.0,
) -> CoactivationProblem:
    """Return tokens of as many topics as ranks, each of which prefers experts of its own.

    Scores are popularity ~ N(0, 0.4) of the expert, Gumbel noise of the token, and `preference` for
    the experts of the topic; the token takes the highest scores. Loads are those of the sample.
    """
    topics = ranks.num_ranks
    expert_LTK = np.empty((num_layers, num_tokens, num_chosen), dtype=np.int64)
    load_LE = np.empty((num_layers, num_experts))
    for layer in range(num_layers):
        topic_E = rng.permutation(np.arange(num_experts) * topics // num_experts)
        topic_T = rng.integers(topics, size=num_tokens)
        score_TE = rng.gumbel(size=(num_tokens, num_experts)) + rng.normal(0, 0.4, num_experts)
        score_TE += preference * (topic_T[:, None] == topic_E)
        expert_LTK[layer] = np.argpartition(-score_TE, num_chosen, axis=1)[:, :num_chosen]
        load_LE[layer] = np.bincount(expert_LTK[layer].ravel(), minlength=num_experts)
    return CoactivationProblem(
        expert_LTK=expert_LTK, load_LE=load_LE, ranks=ranks, levels=rank_and_node_levels(ranks)
    )


def tiny_problem(rng: np.random.Generator) -> CoactivationProblem:
    """Return a random instance small enough to try everything, sometimes without a solution."""
    slots_G, node_G = [
        ((3, 3), (0, 1)),
        ((2, 2, 2), (0, 0, 0)),
        ((2, 2, 1), (0, 0, 1)),
        ((1, 1, 1, 1), (0, 0, 1, 1)),
        ((1, 2, 1, 1), (0, 0, 1, 1)),
    ][rng.integers(5)]
    ranks = Ranks(slots_G=np.array(slots_G), node_G=np.array(node_G), speed_G=np.ones(len(slots_G)))
    num_layers, num_experts = int(rng.integers(1, 3)), ranks.num_slots
    num_tokens, num_chosen = int(rng.integers(1, 30)), int(rng.integers(1, 4))
    expert_LTK = _choices(rng, (num_layers, num_tokens), num_experts)[:, :, :num_chosen]
    load_LE = rng.integers(1, 9, size=(num_layers, num_experts)).astype(np.float64)
    share_L = load_LE.sum(axis=1) / len(slots_G)
    return CoactivationProblem(
        expert_LTK=expert_LTK.copy(),
        load_LE=load_LE,
        ranks=ranks,
        levels=tuple(
            Level(
                group_G=group_G,
                total_cost=float(rng.integers(0, 4)),
                peak_cost=float(rng.integers(0, 3)),
                weight_J=rng.choice([0.5, 1.0, 10.0], size=int(group_G.max()) + 1)
                if rng.random() < 0.5
                else None,
            )
            for group_G in (ranks.node_G.copy(), np.arange(ranks.num_ranks))
        ),
        most_load_L=np.ceil(share_L * rng.uniform(1.0, 1.6)) if rng.random() < 0.6 else None,
    )


def _choices(rng: np.random.Generator, shape: tuple[int, int], num_experts: int) -> Ints:
    return np.asarray(np.argsort(rng.random((*shape, num_experts)), axis=2), dtype=np.int64)
