"""The bound on seconds, and where merged tokens go."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solvers.placement.ranks import Placement, Ranks
from tests.expect import present
from tuner.search.place.evaluation import evaluate
from tuner.search.place.prices import Pricing, place_pool, pricing_of, rank_of_choices
from tuner.spec.cluster import Cluster, Pool
from tuner.spec.huggingface.read import read_model
from tuner.spec.place import PlaceGoal, RecordedWorkload

MODELS = Path(__file__).parents[4] / "examples" / "models"


def pricing(*, merged: bool = False) -> Pricing:
    cluster = Cluster(pools=(Pool(name="h", device="h100-sxm", nodes=2, devices_per_node=8),))
    goal = PlaceGoal(
        kind="place",
        ranks=4,
        ranks_per_node=2,
        exchange="merged" if merged else "plain",
        workloads=(RecordedWorkload(name="chat", path=Path("chat.json")),),
    )
    return present(
        pricing_of(
            read_model(MODELS / "olmoe-1b-7b" / "config.json"), place_pool(cluster, goal), goal
        )
    )


def placements(rng: np.random.Generator, ranks: Ranks, experts: int) -> Iterator[Placement]:
    for _ in range(30):
        spare = rng.integers(0, experts, ranks.num_slots - experts)
        row = rng.permutation(np.concatenate([np.arange(experts), spare]))
        yield Placement(expert_LS=row[None])


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    tokens=st.sampled_from([3.0, 40.0, 600.0, 9000.0]),
    speeds=st.sampled_from([(1.0, 1.0, 1.0, 1.0), (2.0, 1.0, 1.0, 0.5), (3.0, 0.1, 1.0, 1.0)]),
)
def test_no_placement_goes_below_the_bound(
    seed: int, tokens: float, speeds: tuple[float, ...]
) -> None:
    rng = np.random.default_rng(seed)
    made = pricing()
    ranks = Ranks(
        slots_G=np.array([3, 3, 2, 2]), node_G=np.array([0, 0, 1, 1]), speed_G=np.array(speeds)
    )
    load_PLE = tokens * rng.dirichlet(np.full(8, 0.7))[None, None]
    bound = made.bound_L(load_LE=load_PLE[0], ranks=ranks)[0]
    for placement in placements(rng, ranks, 8):
        evaluation = evaluate(placement, load_PLE=load_PLE, ranks=ranks, dispatch="even")
        priced = made.price(placement, evaluation, load_PLE=load_PLE, ranks=ranks, token_LTK=None)
        assert priced.pass_P[0] >= bound * (1.0 - 1e-9)


def test_merged_tokens_take_replicas_in_turn() -> None:
    ranks = Ranks(slots_G=np.array([2, 2]), node_G=np.array([0, 1]), speed_G=np.ones(2))
    placement = Placement(expert_LS=np.array([[0, 1, 2, 0]]))
    # Expert 0 on rank 0 for the first token, with 1; on rank 1 for the second, away from 1.
    token_LTK = np.array([[[0, 1], [0, 1]]])
    assert rank_of_choices(placement, token_LTK, ranks).tolist() == [[[0, 0], [1, 0]]]


def test_a_merged_exchange_needs_tokens() -> None:
    ranks = Ranks.uniform(ranks=2, slots_per_rank=1)
    with pytest.raises(ValueError, match="sampled tokens"):
        rank_of_choices(Placement(expert_LS=np.array([[0, 1]])), None, ranks)
