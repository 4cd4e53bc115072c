"""Bytes between nodes: predicted from the configuration, counted by the step."""

from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profilers.steps.config import StepConfig
from profilers.steps.crossing import inter_node_bytes
from profilers.steps.loads import forced_copies, forced_experts

Fields = dict[str, Any]
Observed = dict[str, dict[str, Any]]
Tiny = Callable[..., Fields]

SKEWS: Mapping[str, list[float]] = {
    "even": [0.125] * 8,
    "slope": [0.3, 0.25, 0.15, 0.1, 0.1, 0.05, 0.05, 0.0],
    "one node": [0.3, 0.3, 0.2, 0.2, 0.0, 0.0, 0.0, 0.0],
    "alternating": [0.24, 0.01] * 4,
}
CUTS: Mapping[str, Fields] = {
    "plain": {"data": 4, "expert": 4},
    "bf16, selective": {
        "data": 4,
        "expert": 4,
        "precision": "bf16",
        "stage": {"recompute": "selective", "chunks": 2},
    },
    "tensor 2, full": {"tensor": 2, "data": 2, "expert": 4, "stage": {"recompute": "full"}},
    "inside nodes": {"data": 4, "expert": 2},
}
TOP_K = 3


def _cases(tiny_config: Tiny, pairs: Iterable[tuple[str, str]]) -> dict[str, Fields]:
    """2 nodes of 2 ranks: pairs of a skew and a cut, with both dispatchers."""
    cases = {}
    for (skew, cut), dispatcher in product(pairs, ("flat", "hierarchical")):
        routing = {"mode": "forced", "load_ratio": [SKEWS[skew]] * 3}
        fields = tiny_config(**CUTS[cut], nodes_of=2, routing=routing, steps=1)
        fields["model"]["top_k"] = TOP_K
        fields["parallelism"]["dispatcher"] = dispatcher
        cases[f"{skew}/{cut}/{dispatcher}"] = fields
    return cases


@pytest.fixture(scope="module")
def cases(tiny_config: Tiny) -> dict[str, Fields]:
    """Every skew and every cut once."""
    return _cases(tiny_config, zip(SKEWS, CUTS, strict=True))


@pytest.fixture(scope="module")
def observed(
    tmp_path_factory: pytest.TempPathFactory,
    cases: dict[str, Fields],
    observe_cases: Callable[..., Observed],
) -> Observed:
    return observe_cases(tmp_path_factory.mktemp("crossing"), cases, ranks=4)


def test_every_skew_sends_between_nodes_what_was_predicted(
    cases: dict[str, Fields], observed: Observed
) -> None:
    _check_bytes(cases, observed)


def _check_bytes(cases: Mapping[str, Fields], observed: Observed) -> None:
    predicted = {
        name: inter_node_bytes(StepConfig.model_validate(fields), ranks_per_node=2)
        for name, fields in cases.items()
    }
    counted = {name: seen["inter_node_bytes"][0] for name, seen in observed.items()}
    # No tolerance: whole sequences lie on one node.
    assert counted == predicted
    assert all((counted[name] == 0) == ("inside nodes" in name) for name in counted)


def test_de_duplication_saves_rows_and_changes_no_loss(observed: Observed) -> None:
    _check_de_duplication(observed)


def _check_de_duplication(observed: Observed) -> None:
    for name, seen in observed.items():
        if not name.endswith("/hierarchical") or "inside nodes" in name:
            continue
        flat = observed[name.replace("hierarchical", "flat")]
        # Gates and ids cost less than the duplicates, of which there are 1 in 3 at least.
        assert seen["inter_node_bytes"][0] < 0.8 * flat["inter_node_bytes"][0], name
        tolerance = 1e-2 if "bf16" in name else 1e-5
        assert seen["losses"] == pytest.approx(flat["losses"], rel=tolerance)


@pytest.mark.slow
def test_every_skew_is_cut_in_every_way(
    tmp_path: Path, tiny_config: Tiny, observe_cases: Callable[..., Observed]
) -> None:
    cases = _cases(tiny_config, product(SKEWS, CUTS))
    found = observe_cases(tmp_path, cases, ranks=4)
    _check_bytes(cases, found)
    _check_de_duplication(found)


def test_rows_by_hand(tiny_config: Tiny) -> None:
    # Even loads, 8 sequences of 32 tokens, 3 copies each: 8 * 96 / 2 = 384 copies cross, while each
    # of 256 tokens crosses once. fp32, 32 columns, 3 MoE layers, one forward and one backward pass.
    fields = _cases(tiny_config, [("even", "plain")])["even/plain/flat"]
    flat = StepConfig.model_validate(fields)
    assert inter_node_bytes(flat, ranks_per_node=2) == 3 * 384 * 2 * 2 * 32 * 4
    fields["parallelism"]["dispatcher"] = "hierarchical"
    once = StepConfig.model_validate(fields)
    row = 2 * (2 * 32 * 4 + 3 * 4) + 3 * 4
    assert inter_node_bytes(once, ranks_per_node=2) == 3 * 256 * row


@settings(deadline=None, max_examples=60)
@given(
    weights=st.lists(st.integers(0, 9), min_size=8, max_size=8).filter(any),
    top_k=st.integers(1, 8),
    nodes=st.sampled_from([2, 4, 8]),
)
def test_the_deal_reaches_as_many_nodes_as_equation_7_counts(
    weights: list[int], top_k: int, nodes: int
) -> None:
    tokens = 24
    ratio = [float(Fraction(weight, sum(weights))) for weight in weights]
    copies = forced_copies(ratio, tokens=tokens, top_k=top_k)
    experts_TK = forced_experts(copies, top_k=top_k, seed=(1,))
    node_TK = experts_TK // (8 // nodes)
    needed = [int(np.any(node_TK == node, axis=1).sum()) for node in range(nodes)]
    of_node = np.array(copies).reshape(nodes, -1).sum(axis=1)
    assert needed == np.minimum(of_node, tokens).tolist()


def test_learned_routing_is_not_predicted(tiny_config: Tiny) -> None:
    config = StepConfig.model_validate(tiny_config(data=4, expert=4, nodes_of=2))
    with pytest.raises(ValueError, match="learned routing"):
        inter_node_bytes(config, ranks_per_node=2)


def test_nodes_that_cut_expert_groups_unevenly_are_refused(tiny_config: Tiny) -> None:
    with pytest.raises(ValueError, match="ranks_per_node 3 to divide expert 4"):
        StepConfig.model_validate(tiny_config(data=4, expert=4, nodes_of=3))


def test_a_flat_step_is_written_as_before(tiny_config: Tiny) -> None:
    config = StepConfig.model_validate(tiny_config())
    assert not {"dispatcher", "ranks_per_node"} & config.model_dump()["parallelism"].keys()
    across = StepConfig.model_validate(tiny_config(data=4, expert=4, nodes_of=2))
    assert StepConfig.model_validate_json(across.model_dump_json()) == across
