"""The rules of the plugin that puts attention and experts on servers of their own."""

from typing import Any

from tests.rows import each_row
from tests.tuner.engines.serving.testing import (
    AFD_ENGINE,
    aggregated,
    attention_expert,
    sample_serving,
)
from tests.tuner.models import example_model
from tuner.catalog.serve_rules.rules import refusals
from tuner.config.serve import ServeDecision
from tuner.devices.catalogue import DEVICES, find_device
from tuner.engines.serving.releases import ENGINES, engine_manifest
from tuner.engines.vllm_afd.capabilities import AFD_PLUGIN, VLLM_0_30_AFD
from tuner.spec.model import ModelSpec

DATA_TWO: dict[str, Any] = {"attention_tp": 2, "attention_dp": 2}


DEEPSEEK, QWEN, MIXTRAL = map(example_model, ("deepseek-v3", "qwen3-235b-a22b", "mixtral-8x7b"))
TENSOR: dict[str, Any] = {"devices": 4, "attention_tp": 4, "attention_dp": 1}
HALVED: dict[str, Any] = {"two_batch_overlap": True}


def _refused(
    decision: ServeDecision,
    model: ModelSpec,
    *,
    device: str = "h200-sxm",
    **goal: Any,
) -> str:
    plan = sample_serving(model, decision, goal=AFD_ENGINE | goal).plan
    return "\n".join(
        refusals(
            engine_manifest(plan.goal.engine),
            decision,
            model=model,
            goal=plan.goal,
            devices_per_node={pool.name: 8 for pool in plan.cluster.pools},
            sheets={pool.name: find_device(device) for pool in plan.cluster.pools},
        )
    )


@each_row("model", (DEEPSEEK, QWEN))
@each_row(
    "decision",
    (
        attention_expert(),
        attention_expert(attention={"devices": 3, "attention_dp": 3}),
        attention_expert(attention=TENSOR, expert={**TENSOR, "ep": 4}),
        attention_expert(attention=HALVED, expert=HALVED),
        aggregated(),
    ),
)
def test_a_cell_by_the_rules_is_launched(decision: ServeDecision, model: ModelSpec) -> None:
    assert _refused(decision, model) == ""


@each_row(
    ("changes", "line"),
    [
        ({"expert": {"devices": 8, "attention_dp": 8, "ep": 8}}, "at least num_ffn_ranks"),
        ({"attention": {"count": 3}}, "do not pair up"),
        ({"expert": {"pool": "h20"}}, "AFD units over two pools (h100, h20)"),
        ({"attention": {"pp": 2, "devices": 8}}, "pp 2 must be 1"),
        ({"attention": {"draft_tokens": 2}}, "no draft layer has a wrapper"),
        ({"attention": {"ep": 4}}, "ep 4 of a server without experts must be 1"),
        ({"expert": {"ep": 1, "moe_tp": 1}}, "experts are on all 2 devices"),
        ({"expert": {"a2a_backend": "deepep_low_latency"}}, "no recipe runs it"),
        ({"attention": DATA_TWO}, "tensor ranks of an FFN server must get the same tokens"),
        ({"attention": {"two_batch_overlap": True}}, "use two_batch_overlap, or neither"),
        ({"connector": "mooncake"}, "connector mooncake is not one of nixl"),
    ],
)
def test_a_cell_that_breaks_a_rule_is_refused_by_it(changes: dict[str, Any], line: str) -> None:
    lines = _refused(attention_expert(**changes), DEEPSEEK)
    assert line in lines
    assert all(each.startswith("vllm 0.30.0+afd: ") for each in lines.splitlines())


def test_models_and_devices_without_support_are_refused() -> None:
    assert "no wrapper splits MixtralForCausalLM" in _refused(attention_expert(), MIXTRAL)
    both = attention_expert(attention=DATA_TWO, expert={"devices": 4, **DATA_TWO, "ep": 4})
    assert _refused(both, DEEPSEEK) == ""
    assert "without sequence-parallel experts" in _refused(both, QWEN)
    other = next(
        name for name, sheet in DEVICES.items() if AFD_PLUGIN.connector(sheet.generation) is None
    )
    lines = _refused(attention_expert(), DEEPSEEK, device=other)
    assert "no connector runs on" in lines
    assert "CAMP2pAFDConnector (Ascend 910C)" in lines


def test_nobody_gets_the_experiment_who_does_not_name_it() -> None:
    assert ENGINES["vllm"][0].afd is None
    assert VLLM_0_30_AFD.afd is AFD_PLUGIN
    others = [one for engines in ENGINES.values() for one in engines if one.afd is None]
    assert all("attention_expert" not in one.modes for one in others)
