"""What launch files leave to the user is named in the plan's notes and on top of the files."""

from pathlib import Path
from typing import Any

from tests.rows import each_row
from tests.tuner.engines.testing import changed, sample_decision, sample_verified, texts_of
from tests.tuner.models import example_model
from tuner.engines.assumptions import DEADLOCK, assumptions
from tuner.engines.writers import emit
from tuner.goals.train_notes import with_assumptions
from tuner.plans.train import VerifiedPlan
from tuner.spec.goal import Routing
from tuner.spec.model import ModelSpec

MEGATRON = ("megatron-lm", "megatron-bridge")


MIXTRAL = example_model("mixtral-8x7b")


def _verified(
    model: ModelSpec, target: str, *, goal: dict[str, Any], **changes: Any
) -> VerifiedPlan:
    half = model.num_layers // 2
    decision = sample_decision(
        **{"pipeline_layout": (half, model.num_layers - half), "chunks": (1, 1), **changes}
    )
    changes = {f"plan.goal.{name}": value for name, value in goal.items()}
    return changed(sample_verified(model, decision, emit=(target,)), changes)


def _texts(verified: VerifiedPlan) -> dict[str, str]:
    (target,) = verified.plan.emit
    return texts_of(emit(target, verified))


@each_row("target", MEGATRON)
def test_a_coefficient_is_written_where_the_spec_states_it(target: Any) -> None:
    texts = _texts(_verified(MIXTRAL, target, goal={"moe_aux_loss_coeff": 1e-3}))
    lines = "".join(texts.values()).splitlines()
    assert {"--moe-aux-loss-coeff 0.001", "model.moe_aux_loss_coeff=0.001"} & set(lines)
    assert any("auxiliary loss with coefficient 0.001" in line for line in lines), target


@each_row("target", MEGATRON)
def test_without_one_it_is_not_written_and_every_file_says_so(target: Any) -> None:
    said = "assumed: balanced routing, though no auxiliary loss is written here"
    for name, text in _texts(_verified(MIXTRAL, target, goal={})).items():
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        assert not any("aux" in line for line in lines), (target, name)
        assert said in text, (target, name)


def test_nothing_is_assumed_of_a_recorded_routing_or_of_a_dense_model() -> None:
    recorded = {"routing": Routing(path=Path("routing.json"))}
    dense = example_model("llama-3.1-405b")
    alone = {"expert_model_parallel_size": 1, "expert_data_parallel_size": 8}
    for verified in (
        _verified(MIXTRAL, "megatron-lm", goal=recorded),
        _verified(dense, "megatron-lm", goal={}, recompute_modules=(), **alone),
    ):
        plan = verified.plan
        assert assumptions("megatron-lm", plan.model, plan.goal, verified.decision) == ()


def test_a_bias_of_the_experts_balances_them() -> None:
    model = example_model("deepseek-v3")
    verified = _verified(model, "megatron-lm", goal={})
    (line,) = assumptions("megatron-lm", model, verified.plan.goal, verified.decision)
    assert "the experts' bias is to bring about" in line


def test_chunks_under_expert_parallelism_warn_in_the_plan_and_in_every_file() -> None:
    chunked = _verified(MIXTRAL, "megatron-lm", goal={}, chunks=(4, 4))
    assert any(DEADLOCK in note for note in with_assumptions(chunked.plan).provenance.notes)
    assert all(f"# {DEADLOCK}" in text for text in _texts(chunked).values())
    alone = {"expert_model_parallel_size": 1, "expert_data_parallel_size": 8}
    for safe in (
        _verified(MIXTRAL, "megatron-lm", goal={}),
        _verified(MIXTRAL, "megatron-lm", goal={}, chunks=(4, 4), **alone),
    ):
        assert not any(DEADLOCK in note for note in with_assumptions(safe.plan).provenance.notes)
        assert not any(DEADLOCK in text for text in _texts(safe).values())


def test_a_plan_names_the_target_of_each_assumption() -> None:
    plan = _verified(MIXTRAL, "megatron-lm", goal={}).plan
    both = changed(plan, {"emit": ("megatron-lm", "deepspeed", "slurm")})
    notes = with_assumptions(both).provenance.notes
    assert any(note.startswith("megatron-lm: assumed: balanced routing") for note in notes)
    assert any(note.startswith("deepspeed: assumed: gradients reduced in fp32") for note in notes)
