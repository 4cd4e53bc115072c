"""What may be launched beside a deployment's plan, priced with the plan's own kernels."""

import shutil
from pathlib import Path

import pytest

from tests.expect import present
from tuner.errors import PlanUnreadableError
from tuner.goals.serve_folder import write_serve_plan
from tuner.goals.serve_plan import deploy
from tuner.goals.serve_planned import neighbours
from tuner.verify.deployments.space import PlannedDeployments

MODEL = Path(__file__).parents[3] / "examples" / "models" / "olmoe-1b-7b" / "config.json"
SPEC = f"""
schema_version: 1
model: {MODEL}
cluster:
  pools: [{{name: h100, device: h100-sxm, nodes: 1, devices_per_node: 4, nic: 50GB/s}}]
goal:
  kind: serve
  engine: {{name: vllm}}
  traffic: {{rate: 20/s, input_tokens: 1000, output_tokens: 200}}
  slo: {{tpot: {{p90: 40ms}}}}
  max_model_len: 4096
  modes: [aggregated]
emit: [vllm]
"""


def test_a_plans_choice_has_neighbours_with_other_batches(
    tmp_path: Path,
) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC)
    made = deploy(spec, time_limit_s=20.0)
    folder, plan = tmp_path / "plan", made.plan
    write_serve_plan(folder, plan, spec=made.spec, profiles=made.profiles)
    near = neighbours(folder, plan)
    (own,) = present(plan.decision).instances
    assert len(near) >= 4
    for decision in near:
        (group,) = decision.instances
        batches = (group.max_batch, group.max_batched_tokens)
        assert batches != (own.max_batch, own.max_batched_tokens)
        assert group.max_batched_tokens >= group.max_batch
        assert (group.devices, group.count) == (own.devices, own.count)
    fewer = [
        predicted
        for decision, predicted in near.items()
        if decision.instances[0].max_batch < own.max_batch
        and decision.instances[0].max_batched_tokens == own.max_batched_tokens
    ]
    # A smaller batch decodes no slower.
    assert fewer
    assert all(one.tpot_s.mean <= 1.001 * present(plan.predicted).tpot_s.mean for one in fewer)
    points = PlannedDeployments(plan=plan, neighbours=near).points()
    assert next(iter(points)) == plan.decision
    assert len(points) > len(near)
    assert {len(one.predicted) for one in points.values()} == {2}
    # The simulation of remote prefill needs its threshold, which is not looked up.
    remote = present(plan.decision).model_copy(update={"mode": "prefill_offload"})
    assert neighbours(folder, plan.model_copy(update={"decision": remote})) == {}
    shutil.rmtree(folder / "used")
    with pytest.raises(PlanUnreadableError):
        neighbours(folder, plan)
