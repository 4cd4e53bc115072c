"""Experts without weights in serving: who computes their copies, and where pipelines are cut."""

from dataclasses import replace

import numpy as np
import pytest

from tests.expect import present
from tests.rows import Failures
from tests.tuner.models import example_model
from tuner.costs.serve.all_to_all import ExpertTraffic
from tuner.costs.serve.decoder import Experts, Formats, decoder_of
from tuner.costs.serve.engine import A2aBackend, InstanceDegrees
from tuner.costs.serve.expert_loads import ExpertLoads
from tuner.costs.serve.iteration import Iteration
from tuner.costs.serve.memory import stage_ratio, weight_bytes
from tuner.costs.serve.speculative import DraftMethod, draft_decoder
from tuner.costs.serve.zero_experts import computed_copies, computed_loads
from tuner.devices.catalogue import find_device
from tuner.engines.serving.releases import ENGINE_TRAITS
from tuner.prices.serve.machine import ServingMachine

BF16 = Formats(attention="bf16", output="bf16", ffn="bf16", experts="bf16", kv="bf16")
LONGCAT = decoder_of(example_model("longcat-flash"))
EXPERTS = Experts(num=512, top_k=12, ffn=2048, shared_ffn=12288, zero=256)
SKIPPED, TO_AN_EXPERT = (
    replace(ENGINE_TRAITS["vllm"], computes_zero_copies=choice) for choice in (False, True)
)


def instance(experts: Experts, *, engine: str) -> Iteration:
    return Iteration(
        decoder=replace(LONGCAT, experts=experts),
        formats=BF16,
        degrees=InstanceDegrees(expert=8, attention_data=8),
        traits=ENGINE_TRAITS[engine],
        machine=ServingMachine(engines=ENGINE_TRAITS, sheet=find_device("h200-sxm"), tables=None),
    )


def test_a_decoder_has_what_the_config_says() -> None:
    assert LONGCAT.experts == EXPERTS
    assert [(group.count, group.dense_ffn) for group in LONGCAT.layers] == [(28, 0), (28, 12288)]
    assert (EXPERTS.router_outputs, EXPERTS.computed_top_k) == (768, 8.0)


def test_copies_by_hand() -> None:
    assert computed_copies(EXPERTS, SKIPPED) == 12 * 512 / 768 == 8
    assert computed_copies(EXPERTS, TO_AN_EXPERT) == 12
    assert computed_loads(EXPERTS, SKIPPED, None, ranks=8) is None
    loads = present(computed_loads(EXPERTS, TO_AN_EXPERT, None, ranks=8))
    # Of 12 copies 4 are for experts without weights, and expert 0 gets them beside its own 1/64.
    assert loads.top_k * loads.share_LE[0, :2] == pytest.approx([4 + 12 / 768, 12 / 768])
    # Its rank has 64 / 768 of the copies like any other, and a third of all.
    assert loads.expert_imbalance(8) == pytest.approx(8 * (64 / 768 + 1 / 3))
    assert loads.expert_imbalance(1) == pytest.approx(1.0)
    # Unequal ranks have no such loads.
    assert computed_loads(EXPERTS, TO_AN_EXPERT, None, ranks=7) is None


def test_recorded_loads_keep_their_shares_among_experts_with_weights() -> None:
    share_LE = np.array([[0.1, 0.2, 0.3, 0.4]])
    recorded = ExpertLoads(share_LE=share_LE, top_k=1.0, expert_LS=np.array([[3, 2, 1, 0]]))
    four = Experts(num=4, top_k=2, ffn=8, zero=4)
    loads = present(computed_loads(four, TO_AN_EXPERT, recorded, ranks=2))
    # Half the copies are for experts without weights.
    assert loads.share_LE == pytest.approx(np.array([[0.55, 0.1, 0.15, 0.2]]))
    assert (loads.top_k, loads.expert_LS is recorded.expert_LS) == (2, True)
    assert computed_loads(four, SKIPPED, recorded, ranks=2) is recorded


def test_engines_say_whether_they_compute_them() -> None:
    computing = {name for name, own in ENGINE_TRAITS.items() if own.computes_zero_copies}
    assert computing == {"vllm", "sglang"}


def test_router_experts_and_exchange_follow_the_copies(failures: Failures) -> None:
    tokens_Q = np.array([64.0, 4096.0])
    without, skipped, computed = (
        instance(replace(EXPERTS, zero=0, top_k=8), engine="trtllm"),
        instance(EXPERTS, engine="trtllm"),
        instance(EXPERTS, engine="vllm"),
    )
    assert [one.computed_copies for one in (without, skipped, computed)] == [8, 8, 12]
    parts = [one.linear_parts(tokens_Q) for one in (without, skipped, computed)]
    for name in ("experts", "exchange", "shared", "dense", "projections"):
        with failures.of(name):
            assert parts[1][name] == pytest.approx(parts[0][name], rel=1e-12)
    # The router is half as wide again, and two small kernels sum the other copies and add them.
    with failures.of("router"):
        assert (parts[1]["router"] > parts[0]["router"]).all()
    with failures.of("small"):
        assert parts[1]["small"] / parts[0]["small"] == pytest.approx(
            [(28 * (1 + 6) + 28 * 3) / (28 * (1 + 4) + 28 * 3)] * 2
        )
    # Many tokens are bound by GEMMs, and the rank of expert 0 has 10/3 of 12 copies, not one of 8.
    with failures.of("computed"):
        ratio = parts[2]["experts"][1] / parts[1]["experts"][1]
        assert 3.0 < ratio < 10 / 3 * 12 / 8 + 0.1


def test_dispatched_bytes_by_hand() -> None:
    machine = ServingMachine(engines=ENGINE_TRAITS, sheet=find_device("h200-sxm"), tables=None)
    tokens_Q = np.array([32.0, 64.0])

    def sent_s(top_k: float) -> float:
        traffic = ExpertTraffic(
            machine=machine,
            hidden=6144,
            top_k=top_k,
            ranks=64,
            a2a_backend=A2aBackend.LOW_LATENCY,
            software="vllm",
        )
        few, many = traffic.seconds(tokens_Q, together_Q=8 * tokens_Q)
        return float(many - few)

    # Eight copies of twelve cross the network, with as much less time beyond the latency.
    assert sent_s(8.0) / sent_s(12.0) == pytest.approx(8 / 12)


def test_weights_by_hand() -> None:
    attention = 6144 * 1536 + 1536 * 64 * 192 + 6144 * 576 + 512 * 64 * 256 + 64 * 128 * 6144
    # In decode steps a second copy of the up-projection of keys and values is kept.
    attention += 512 * 64 * 256
    layer = 2 * (attention + 3 * 6144 * 12288) + 768 * 6144 + 512 * 3 * 6144 * 2048
    assert weight_bytes(LONGCAT, BF16, InstanceDegrees()) == 2 * (28 * layer + 2 * 131_072 * 6144)


def test_a_pipeline_keeps_layers_together_that_a_shortcut_joins() -> None:
    assert (LONGCAT.num_layers, LONGCAT.most_stages) == (56, 28)
    # Eight stages: four of four layers of LongCat, and four of three.
    assert stage_ratio(LONGCAT, InstanceDegrees(pipeline=8)) == 4 / 28
    assert stage_ratio(replace(LONGCAT, stage_unit=1), InstanceDegrees(pipeline=8)) == 7 / 56


def test_its_draft_layer_is_dense() -> None:
    draft = draft_decoder(LONGCAT, DraftMethod.MTP)
    assert [(group.count, group.dense_ffn) for group in draft.layers] == [(1, 12288)]
    assert (draft.moe_layers, stage_ratio(draft, InstanceDegrees())) == (0, 1.0)
