from collections import Counter
from itertools import product

import numpy as np

from tests.expect import present
from tests.rows import each_row
from tests.tuner.search.train.testing import make_problem
from tuner.catalog.manifest import Capabilities
from tuner.search.train.degrees import legal_degrees
from tuner.search.train.problem import TrainProblem
from tuner.spec.search import Search


def every(problem: TrainProblem) -> list[tuple[int, ...]]:
    """The box, one combination after the other: tp, cp, pp, dp, vpp, mbs, ep, etp."""
    n, batch = problem.num_devices, problem.global_batch_size
    sizes = [d for d in range(1, n + 1) if n % d == 0]
    legal: list[tuple[int, ...]] = []
    for tp, cp, pp in product(sizes, repeat=3):
        if n % (tp * cp * pp):
            continue
        most = max(1, problem.model.num_layers // pp) if pp > 1 else 1
        micro = [b for b in range(1, batch + 1) if batch % b == 0]
        ranks = n // pp
        pairs = [(e, t) for e, t in product(range(1, ranks + 1), repeat=2) if ranks % (e * t) == 0]
        dp = n // (tp * cp * pp)
        legal += [
            (tp, cp, pp, dp, v, b, e, t)
            for v, b, (e, t) in product(range(1, most + 1), micro, pairs)
        ]
    return legal


def is_legal(problem: TrainProblem, combination: tuple[int, ...]) -> bool:
    """The rules read once more, in plain words."""
    tp, cp, pp, dp, v, b, e, t = combination
    model, batch, s = problem.model, problem.global_batch_size, problem.sequence_length
    heads, kv_heads = model.attention.num_heads, model.attention.num_kv_heads
    rules = [
        heads % tp == 0,
        kv_heads % tp == 0 or tp % kv_heads == 0,
        s % tp == 0,
        cp == 1 or s % (2 * cp * tp) == 0,
        pp <= model.num_layers,
        batch // b >= dp,
        v == 1 or batch % (b * dp * pp) == 0,
        # Every rank of an expert group is in a replica of as many micro-batches.
        pp == 1 or all(len(set(one)) == 1 for one in expert_groups(tp * cp, dp, e * t, batch // b)),
        v == 1 or spare(model.num_layers, pp * v),
        present(model.moe).num_experts % e == 0,
        present(model.moe).expert_ffn_size % t == 0,
    ]
    return all(rules)


def expert_groups(ranks: int, dp: int, group: int, micro_batches: int) -> list[list[int]]:
    """Micro-batches of the ranks of each expert group, as near to equal as the groups allow."""
    best: list[list[int]] = [[0, 1]]
    for spanned in (one for one in range(1, dp + 1) if dp % one == 0 and micro_batches % one == 0):
        least, more = divmod(micro_batches // spanned, dp // spanned)
        counts = [least + (replica // spanned < more) for replica in range(dp)]
        of_rank = [counts[rank // ranks] for rank in range(ranks * dp)]
        groups = [of_rank[at : at + group] for at in range(0, len(of_rank), group)]
        if all(len(set(one)) == 1 for one in groups):
            best = groups
    return best


def spare(layers: int, stages: int) -> bool:
    each = -(-layers // stages)
    return each * stages - layers <= 2 * each


@each_row(("devices", "batch"), [(1, 4), (4, 6), (6, 12), (12, 8)])
def test_the_legal_combinations_are_those_of_brute_force(devices: int, batch: int) -> None:
    problem = make_problem(devices=devices, global_batch_size=batch)
    degrees = legal_degrees(problem)
    rows = degrees.rows(np.arange(degrees.num_partials))
    names = ("tensor", "context", "pipeline", "data", "virtual_pipeline", "micro_batch")
    listed = Counter(
        zip(*(rows[name].tolist() for name in (*names, "expert", "expert_tensor")), strict=True)
    )
    combinations = every(problem)
    expected = Counter(one for one in combinations if is_legal(problem, one))

    assert listed == expected
    assert degrees.num_legal == sum(expected.values())
    assert sum(degrees.illegal.values()) == len(combinations) - sum(expected.values())


def test_limits_of_the_user_leave_only_what_they_allow() -> None:
    limits = Search(tensor_model_parallel_size=(2,), expert_model_parallel_size=(4,))
    degrees = legal_degrees(make_problem(limits=limits))

    assert set(degrees.dense_D["tensor"].tolist()) == {2}
    assert set(degrees.pairs_E["expert"].tolist()) == {4}
    assert degrees.illegal["search.tensor_model_parallel_size leaves it out"] > 0


def test_what_a_target_lacks_is_counted_against_it() -> None:
    poor = Capabilities(names=("poor",), context_parallel=False, virtual_pipeline=False)
    degrees = legal_degrees(make_problem(capabilities=poor))

    assert set(degrees.dense_D["context"].tolist()) == {1}
    assert set(degrees.partials_N["virtual_pipeline"].tolist()) == {1}
    assert "the target has no context parallelism" in degrees.illegal


def test_every_domain_holds_a_whole_copy_of_the_state() -> None:
    limits = Search(pipeline_model_parallel_size=(1,), tensor_model_parallel_size=(2,))
    degrees = legal_degrees(make_problem(devices=64, global_batch_size=64, limits=limits))
    rows = degrees.rows(np.arange(degrees.num_partials))
    parts = rows["data"] * rows["context"] // rows["copies"]
    apart = 64 // (rows["expert"] * rows["expert_tensor"])

    assert rows["copies"].max() == 8
    # Four ranks of a domain of eight devices share a copy under tensor parallelism of two.
    assert (parts >= 4).all()
    assert (rows["data"] % rows["copies"] == 0).all()
    assert (apart % rows["copies"] == 0).all()


def test_a_target_without_copies_has_one() -> None:
    poor = Capabilities(names=("poor",), shard_ranks_zero_stages=frozenset())
    assert (legal_degrees(make_problem(devices=64, capabilities=poor)).pairs_E["copies"] == 1).all()


def test_a_dense_model_has_no_expert_degrees() -> None:
    degrees = legal_degrees(make_problem("llama-3.1-8b"))

    assert set(degrees.pairs_E["expert"].tolist()) == {1}
    assert "expert_model_parallel_size above 1 in a model without experts" in degrees.illegal
