"""Questions of a plan that are solved again: the answer is what planning the changed spec gives."""

import json
import shutil
from pathlib import Path

import pytest

from profilers.errors import RecordingUnreadableError
from tests.expect import present
from tuner import api
from tuner.errors import PlanUnreadableError, SpecError
from tuner.explain.explanation import explain
from tuner.explain.other_limits import what_if, what_ifs
from tuner.explain.outcomes import to_outcome
from tuner.goals.place_folder import write_place_plan
from tuner.goals.place_plan import place
from tuner.goals.registry import goal_of
from tuner.goals.serve_folder import write_serve_plan
from tuner.goals.serve_plan import deploy
from tuner.goals.train_folder import read_plan, write_plan
from tuner.plans.train import Preference
from tuner.plans.what_if import LimitChange, parse_changes

ROOT = Path(__file__).parents[3]
SPEC = """\
schema_version: 1
model: {root}/examples/models/tiny-moe/config.json
cluster:
  pools:
    - {{name: h, device: h100-sxm, nodes: {nodes}, devices_per_node: 2}}
goal: {{kind: train, sequence_length: 256, global_batch_size: 32}}
search: {{micro_batch_size: [1, 2], context_parallel_size: 1, zero_stage: 1, recompute: none}}
emit: [megatron-lm]
"""


def spec_file(folder: Path, *, nodes: int = 1) -> Path:
    path = folder / f"spec-{nodes}.yaml"
    path.write_text(SPEC.format(root=ROOT, nodes=nodes), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def datasheet_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("datasheet")
    made = api.plan(spec_file(folder))
    write_plan(folder / "plan", made.plan, spec=made.spec, profiles=made.profiles)
    (folder / "spec-1.yaml").unlink()
    return folder / "plan"


@pytest.mark.slow
def test_the_outcome_is_that_of_planning_the_changed_spec(
    datasheet_plan: Path, tmp_path: Path
) -> None:
    found = what_ifs(datasheet_plan, parse_changes("nodes=x2"))
    direct = api.plan(spec_file(tmp_path, nodes=2)).plan
    (outcome,) = found.outcomes
    assert outcome.figures["step_time_s"] == present(direct.predicted).step_time_s
    assert outcome.num_devices == 4
    assert outcome.says == "2 nodes of h instead of 1"
    assert outcome.objective == "tokens_per_s"
    before = found.base.figures["tokens_per_s"]
    assert outcome.gain_ratio == pytest.approx(outcome.figures["tokens_per_s"] / before - 1.0)


def test_nothing_is_better_whose_own_numbers_are_worse(datasheet_plan: Path) -> None:
    base = read_plan(datasheet_plan)
    assert base.predicted is not None
    # Its fastest is twice as fast, but another was preferred that is 1 % slower than before.
    predicted = base.predicted.model_copy(update={"step_time_s": base.predicted.step_time_s * 1.01})
    other = base.model_copy(
        update={
            "predicted": predicted,
            "preferred": Preference(
                fastest=present(base.decision),
                fastest_step_s=base.predicted.step_time_s / 2.0,
                slower_ratio=1.02,
                reasons=("less chance of running out of memory",),
            ),
        }
    )
    found = to_outcome(other, change="nodes=+1", says="", base=base, solve_s=0.0)
    assert found.figures["fastest_step_time_s"] == base.predicted.step_time_s / 2.0
    assert found.gain_ratio == pytest.approx(1.0 / 1.01 - 1.0)


def test_the_unchanged_spec_is_solved_too(datasheet_plan: Path) -> None:
    stored = read_plan(datasheet_plan).predicted
    found = what_ifs(datasheet_plan, ())
    assert found.base.figures["step_time_s"] == present(stored).step_time_s
    assert found.outcomes == ()


@pytest.mark.slow
def test_less_memory_is_never_faster_and_none_fits_nothing(datasheet_plan: Path) -> None:
    found = what_ifs(datasheet_plan, parse_changes("memory=x2,memory=-50%,memory=1MiB"))
    more, less, nothing = found.outcomes
    assert present(more.gain_ratio) >= 0.0 >= present(less.gain_ratio)
    assert nothing.status == "infeasible"
    assert nothing.figures == {}
    assert "memory" in nothing.reason


def test_an_illegal_change_is_an_outcome_with_the_reason(datasheet_plan: Path) -> None:
    outcome = what_if(datasheet_plan, LimitChange(key="nodes", value="200000"))
    assert outcome.status == "refused"
    assert "nodes" in outcome.reason
    assert "spec.yaml" not in outcome.reason


def test_changes_after_the_time_limit_are_not_solved(datasheet_plan: Path) -> None:
    times = iter([0.0, 0.0, 0.0, 0.0, *[100.0] * 20])
    found = what_ifs(
        datasheet_plan,
        parse_changes("memory=x2,memory=x3"),
        time_limit_s=10.0,
        clock=lambda: next(times),
    )
    assert [one.status for one in found.outcomes][1] == "out_of_time"
    assert "--time-limit" in found.outcomes[1].reason


def test_a_profile_is_read_from_its_copy(planned: Path) -> None:
    found = what_ifs(planned, parse_changes("memory=x4,bandwidth=x2"))
    more, links = found.outcomes
    stored = read_plan(planned).predicted
    assert found.base.figures["step_time_s"] == pytest.approx(present(stored).step_time_s)
    assert present(more.gain_ratio) > 0.0
    assert links.status == "refused"


def test_a_folder_without_its_spec_is_refused(planned: Path) -> None:
    (planned / "used" / "spec.yaml").unlink()
    with pytest.raises(PlanUnreadableError, match=r"holds no used/spec\.yaml"):
        what_ifs(planned, parse_changes("nodes=+1"))


def test_a_spec_that_was_changed_since_is_refused(planned: Path) -> None:
    (planned / "used" / "spec.yaml").write_text("goal: 3")
    with pytest.raises(PlanUnreadableError, match="is not the spec that the plan was made from"):
        what_ifs(planned, parse_changes("nodes=+1"))


def test_a_plan_without_its_spec_is_explained_by_what_it_holds(planned: Path) -> None:
    shutil.rmtree(planned / "used")
    why = explain(planned).why
    assert why.rivals
    assert why.what_if is None
    (note,) = why.notes
    assert "nothing could be solved again" in note


def test_a_trace_that_is_gone_is_named(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = "".join(f"{number * 0.25},200,50\n" for number in range(400))
    trace.write_text(f"Timestamp,Request tokens,Response tokens\n{rows}")
    model = ROOT / "examples" / "models" / "mixtral-8x7b"
    (tmp_path / "spec.yaml").write_text(
        f"schema_version: 1\nmodel: {model}\n"
        "cluster: {pools: [{name: h, device: h100-sxm, devices_per_node: 8}]}\n"
        "goal:\n  kind: serve\n  engine: {name: vllm}\n  traffic: {trace: trace.csv}\n"
    )
    made = deploy(tmp_path / "spec.yaml")
    write_serve_plan(tmp_path / "plan", made.plan, spec=made.spec)
    trace.unlink()
    with pytest.raises(SpecError, match=r"trace\.csv"):
        what_ifs(tmp_path / "plan", parse_changes("memory=-20%"))
    assert "trace.csv" in explain(tmp_path / "plan").why.notes[0]


def test_a_recorded_load_is_solved_again_at_twice_its_rate(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = "".join(f"{0.25 * number},1500,200\n" for number in range(400))
    trace.write_text(f"Timestamp,Request tokens,Response tokens\n{rows}")
    path = tmp_path / "spec.yaml"
    path.write_text(
        f"schema_version: 1\nmodel: {ROOT}/examples/models/mixtral-8x7b\n"
        "cluster: {pools: [{name: h, device: h100-sxm, nodes: 1, devices_per_node: 8}]}\n"
        "goal: {kind: serve, engine: {name: vllm}, traffic: {trace: trace.csv},"
        " slo: {ttft: {p90: 1s}, tpot: {p90: 40ms}}, modes: [aggregated]}\n"
    )
    made = deploy(path)
    write_serve_plan(tmp_path / "plan", made.plan, spec=made.spec)
    assert LimitChange(key="rate", value="x2") in goal_of(made.plan).usual_changes(made.plan)
    found = what_ifs(tmp_path / "plan", parse_changes("rate=x2"))
    (twice,) = found.outcomes
    assert twice.says == "8 requests/s instead of 4, the trace's time compressed"
    assert found.base.figures["requests_per_s"] == pytest.approx(4.0, rel=0.02)
    assert twice.figures["requests_per_s"] == pytest.approx(
        2.0 * found.base.figures["requests_per_s"], rel=0.02
    )


def test_a_placement_is_placed_again_from_its_recordings(tmp_path: Path) -> None:
    loads = {
        "num_logical_experts": 8,
        "top_k": 2,
        "layer_ids": [0, 1],
        "logical_count": [[90, 10, 10, 10, 10, 10, 10, 10], [5, 5, 5, 60, 5, 5, 5, 5]],
    }
    recording = tmp_path / "python.json"
    recording.write_text(json.dumps(loads), encoding="utf-8")
    path = tmp_path / "spec.yaml"
    path.write_text(
        "schema_version: 1\ngoal:\n  kind: place\n  ranks: 4\n  ranks_per_node: 2\n"
        "  slots_per_rank: 2\n  workloads: [{name: python, path: python.json}]\nemit: []\n",
        encoding="utf-8",
    )
    made = place(path, time_limit_s=2.0)
    write_place_plan(tmp_path / "plan", made.plan, spec=made.spec, maps=made.maps)
    found = what_ifs(tmp_path / "plan", parse_changes("slots=+1,slots=-1"), time_limit_s=60.0)
    more, fewer = found.outcomes
    assert present(more.gain_ratio) > 0.0
    assert fewer.status == "refused"
    assert "cannot hold 8 experts" in fewer.reason
    recording.unlink()
    with pytest.raises(RecordingUnreadableError, match="python"):
        what_ifs(tmp_path / "plan", ())


def test_runners_up_are_explained_by_terms_that_add_up(datasheet_plan: Path) -> None:
    why = explain(datasheet_plan, changes=()).why
    assert why.rivals
    assert why.what_if is None
    for rival in why.rivals:
        assert rival.slower_s == pytest.approx(sum(rival.terms_s.values()), abs=1e-6)


def test_default_changes_fit_the_plan(datasheet_plan: Path, planned: Path) -> None:
    asked = [
        str(one)
        for one in goal_of(read_plan(datasheet_plan)).usual_changes(read_plan(datasheet_plan))
    ]
    assert asked == ["nodes=+1", "memory=-20%", "bandwidth=x2", "batch=x2"]
    assert "bandwidth=x2" not in [
        str(one) for one in goal_of(read_plan(planned)).usual_changes(read_plan(planned))
    ]


def test_machines_that_cannot_be_used_are_to_be_left_aside(datasheet_plan: Path) -> None:
    # 2 x 13 devices: 32 sequences have no divisor 13, four layers no 13 stages, 13 no tensor cut.
    outcome = what_if(datasheet_plan, LimitChange(key="nodes", value="13"))
    assert outcome.status == "infeasible"
    assert "without the added nodes the plan stays as it is" in outcome.reason
