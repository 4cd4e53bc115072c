"""Bytes between nodes, predicted; test_layouts.py holds them against what steps count."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profilers.steps.config import StepConfig
from profilers.steps.loads import forced_copies, forced_experts
from tests.profilers.steps.crossing import inter_node_bytes

Fields = dict[str, Any]
Tiny = Callable[..., Fields]


def test_rows_by_hand(tiny_config: Tiny) -> None:
    # Even loads, 8 sequences of 32 tokens, 3 copies each: 8 * 96 / 2 = 384 copies cross, while each
    # of 256 tokens crosses once. fp32, 32 columns, 3 MoE layers, one forward and one backward pass.
    routing = {"mode": "forced", "load_ratio": [[0.125] * 8] * 3}
    fields = tiny_config(data=4, expert=4, nodes_of=2, routing=routing, steps=1)
    fields["model"]["top_k"] = 3
    fields["parallelism"]["dispatcher"] = "flat"
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
    node_TK = forced_experts(copies, top_k=top_k, seed=(1,)) // (8 // nodes)
    needed = [int(np.any(node_TK == node, axis=1).sum()) for node in range(nodes)]
    of_node = np.array(copies).reshape(nodes, -1).sum(axis=1)
    assert needed == np.minimum(of_node, tokens).tolist()


def test_what_is_not_predicted_is_refused(tiny_config: Tiny) -> None:
    config = StepConfig.model_validate(tiny_config(data=4, expert=4, nodes_of=2))
    with pytest.raises(ValueError, match="learned routing"):
        inter_node_bytes(config, ranks_per_node=2)
    with pytest.raises(ValueError, match="ranks_per_node 3 to divide expert 4"):
        StepConfig.model_validate(tiny_config(data=4, expert=4, nodes_of=3))


def test_a_flat_step_is_written_as_before(tiny_config: Tiny) -> None:
    config = StepConfig.model_validate(tiny_config())
    assert not {"dispatcher", "ranks_per_node"} & config.model_dump()["parallelism"].keys()
    across = StepConfig.model_validate(tiny_config(data=4, expert=4, nodes_of=2))
    assert StepConfig.model_validate_json(across.model_dump_json()) == across
