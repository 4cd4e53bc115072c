"""Which dispatch rule a plan recommends, what the others cost, and what the plan is made for."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from solvers.placement.ranks import Placement
from tests.expect import present, refused
from tests.printed import words_of
from tests.rows import each_row
from tests.tuner.engines.placement.testing import sample_decision, sample_placement
from tuner.engines.place_writers import emit_placement
from tuner.errors import SpecError, UnsuitedPlacementError
from tuner.goals.place_plan import place
from tuner.goals.place_spec import read_place_spec
from tuner.plans.place import DispatchOutcome, PlacePlan, VerifiedPlacement
from tuner.report.place_page import place_report
from tuner.search.place.dispatch_choice import choose_dispatch
from tuner.search.place.plan_place import state_problem
from tuner.search.settings import SearchSettings
from tuner.spec.place import Dispatch

MODELS = Path(__file__).parents[4] / "examples" / "models"
RANKS = "  ranks: 16\n  ranks_per_node: 4\n  redundant_experts: 16\n"


def spec_file(
    folder: Path, goal: str = "", *, model: str = "deepseek-v2-lite", emit: str = "sglang"
) -> Path:
    """Two layers of 64 experts, six of a token; loads of few passes as skewed as real ones."""
    rng = np.random.default_rng(5)
    share_LE = np.exp(0.63 * rng.standard_normal((2, 64)))
    share_LE /= share_LE.sum(axis=1, keepdims=True)
    passes = [rng.multinomial(48_000, share_LE) for _ in range(12)]
    (folder / "chat.json").write_text(
        json.dumps(
            {
                "num_logical_experts": 64,
                "top_k": 8 if model.startswith("olmoe") else 6,
                "layer_ids": [1, 2],
                "logical_count": np.sum(passes, axis=0).tolist(),
                "passes": np.array(passes).tolist(),
            }
        )
    )
    path = folder / "spec.yaml"
    head = f"schema_version: 1\nmodel: {MODELS / model}\n" if model else "schema_version: 1\n"
    path.write_text(
        f"{head}goal:\n  kind: place\n  workloads: [{{name: chat, path: chat.json}}]\n{RANKS}{goal}"
        f"emit: [{emit}]\n"
    )
    return path


def plan_of(
    folder: Path, goal: str = "", *, model: str = "deepseek-v2-lite", emit: str = "sglang"
) -> PlacePlan:
    return place(spec_file(folder, goal, model=model, emit=emit), time_limit_s=1.0).plan


def compared(plan: PlacePlan) -> dict[tuple[str, bool], DispatchOutcome]:
    return {(one.dispatch, one.has_backend): one for one in present(plan.predicted).dispatches}


def test_rules_of_a_deployment_with_a_backend_are_compared_and_the_best_is_emitted(
    tmp_path: Path,
) -> None:
    plan = plan_of(tmp_path)
    found = compared(plan)
    assert set(found) == {("static", True), ("dynamic", True), ("dynamic", False)}
    static, dynamic, without_backend = (
        found["static", True],
        found["dynamic", True],
        found["dynamic", False],
    )
    # Static and dynamic have the same expected loads; static keeps its table, so the most-loaded
    # rank of a launch has more.
    assert dynamic.imbalance < static.imbalance
    text = words_of(place_report(plan))
    assert "needs goal.a2a_backend: none" in without_backend.words
    assert static.words.endswith("higher")
    chosen = present(plan.predicted).dispatches[0]
    assert chosen.words == "chosen"
    assert (chosen.dispatch, chosen.has_backend) == ("dynamic", True)
    (mark,) = plan.made_for
    assert (mark.engine, mark.release, mark.nodes, mark.ep_size) == ("sglang", "0.5.23", 4, 16)
    assert (mark.dispatch, mark.a2a_backend) == (chosen.dispatch, "deepep")
    # The evaluated loads are those that the chosen rule expects.
    assert present(plan.predicted).outcomes[0].imbalance_after == pytest.approx(chosen.imbalance)
    assert "Made for sglang 0.5.23, 4 nodes, EP 16" in text
    for one in found.values():
        assert one.words in text


def on_devices(path: Path, device: str) -> Path:
    pools = f"{{name: p, device: {device}, nodes: 4, devices_per_node: 8}}"
    path.write_text(path.read_text().replace("goal:", f"cluster:\n  pools: [{pools}]\ngoal:", 1))
    return path


@pytest.mark.slow
def test_lp_is_scored_for_models_and_devices_that_the_engine_runs_it_on(tmp_path: Path) -> None:
    for model, device, said in (
        ("olmoe-1b-7b", "h100-sxm", "not for OlmoeForCausalLM"),
        ("deepseek-v2-lite", "mi300x", "runs 'lp' on Blackwell or Hopper devices, not on mi300x"),
        ("deepseek-v2-lite", "a100-80gb-sxm", "Hopper devices, not on a100-80gb-sxm"),
        ("deepseek-v2-lite", "", "the spec names no devices"),
        ("deepseek-v2-lite", "h100-sxm", ""),
    ):
        path = spec_file(tmp_path, model=model)
        plan = place(on_devices(path, device) if device else path, time_limit_s=1.0).plan
        notes = [note for note in plan.provenance.notes if "lp was not scored" in note]
        assert (("lp", True) in compared(plan)) == (not said)
        assert [said in note for note in notes] == [True] * bool(said)


def test_a_rule_is_chosen_on_fit_passes_and_stays_unless_another_gains_significantly(
    tmp_path: Path,
) -> None:
    problem = state_problem(read_place_spec(spec_file(tmp_path)), settings=SearchSettings())
    (one,) = problem.evidence
    placement = problem.baseline.placement
    other_holdout = replace(one, holdout_PLE=one.holdout_PLE[:, :, ::-1].copy())
    for planned in ("near_dynamic", "static"):
        problem = replace(problem, dispatch=planned)
        choice = choose_dispatch(problem, placement)
        assert choice == choose_dispatch(replace(problem, evidence=(other_holdout,)), placement)
        # Static scatters: dynamic is chosen over it, and never the reverse.
        assert choice[0] == "near_dynamic"
    # Both replicas on one rank: all rules do the same, and none replaces the plan's.
    experts = [
        expert for rank in range(16) for expert in (4 * rank, *range(4 * rank, 4 * rank + 4))
    ]
    twins = Placement(expert_LS=np.tile(np.array(experts), (2, 1)))
    for planned in ("near_dynamic", "static"):
        assert choose_dispatch(replace(problem, dispatch=planned), twins)[0] == planned


def wide_spec(folder: Path, goal: str = "") -> Path:
    """64 ranks of 3 slots: a program for many replicated experts does not fit, for one it does."""
    path = on_devices(spec_file(folder, goal), "h100-sxm")
    text = path.read_text().replace(RANKS, "  ranks: 64\n  slots_per_rank: 3\n")
    path.write_text(text.replace("nodes: 4", "nodes: 8"))
    return path


def test_lp_is_left_out_where_the_engine_would_not_start_with_the_placement(
    tmp_path: Path,
) -> None:
    plan = place(wide_spec(tmp_path), time_limit_s=1.0).plan
    assert ("lp", True) not in compared(plan)
    assert plan.made_for[0].dispatch == "dynamic"
    (note,) = (note for note in plan.provenance.notes if "lp was not scored" in note)
    assert re.search(r"needs \d+\.\d KiB of shared memory .* \d+\.\d KiB$", note)


@pytest.mark.slow
def test_a_named_lp_is_refused_in_one_line_where_no_placement_found_fits(tmp_path: Path) -> None:
    path = wide_spec(tmp_path, "  dispatch: lp\n")
    with refused(SpecError, match=r"spec\.yaml: goal\.dispatch: .* shared memory"):
        place(path, time_limit_s=1.0)
    # Where no placement at all can fit, without a search.
    path.write_text(path.read_text().replace("slots_per_rank: 3", "slots_per_rank: 7"))
    with pytest.raises(SpecError, match="however the 448 slots on 64 ranks are filled; say static"):
        read_place_spec(path)


def test_a_placement_for_lp_is_emitted_only_where_all_rows_fit(tmp_path: Path) -> None:
    experts, ranks = 256, 64
    few = (*range(experts), *[0] * (ranks * 5 - experts))
    decision = sample_decision(
        physical_to_logical=(few, few),
        num_experts=experts,
        ranks=ranks,
        ranks_per_node=8,
        slots_per_rank=(5,) * ranks,
    )
    files = emit_placement("sglang", sample_placement(decision, dispatch=Dispatch.LP))
    (rows,) = (
        json.loads(file.text)["physical_to_logical_map"]
        for file in files
        if file.path.suffix == ".json"
    )
    # Layers without planned experts, in order, would not fit.
    assert [tuple(row) for row in rows] == [few] * 4
    many = tuple(slot % experts for slot in range(ranks * 5))
    other = decision.model_copy(update={"physical_to_logical": (few, many)})
    with pytest.raises(UnsuitedPlacementError, match=r"'lp' needs 262\.0 KiB of shared memory"):
        emit_placement("sglang", sample_placement(other, dispatch=Dispatch.LP))
    assert emit_placement("sglang", sample_placement(other, dispatch=Dispatch.STATIC))


def test_without_replicas_no_rule_is_chosen_and_the_engine_keeps_its_default(
    tmp_path: Path,
) -> None:
    path = spec_file(tmp_path)
    path.write_text(path.read_text().replace("  redundant_experts: 16\n", ""))
    plan = place(path, time_limit_s=1.0).plan
    assert not compared(plan)
    assert plan.made_for[0].dispatch == "static"
    assert not [note for note in plan.provenance.notes if "replicas share" in note]


def test_lp_is_refused_on_devices_that_its_kernel_does_not_run_on(tmp_path: Path) -> None:
    lp = "goal.dispatch: sglang 0.5.23 runs 'lp' on Blackwell or Hopper devices"
    for device in ("mi300x", "a100-80gb-sxm"):
        with refused(SpecError, f"{lp}, not on {device}"):
            read_place_spec(on_devices(spec_file(tmp_path, "  dispatch: lp\n"), device))
    hopper = on_devices(spec_file(tmp_path, "  dispatch: lp\n"), "h100-sxm")
    assert read_place_spec(hopper).cluster is not None


def test_without_a_backend_dynamic_is_all_there_is(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "  a2a_backend: none\n")
    found = compared(plan)
    assert found["dynamic", False].words == "chosen"
    assert "needs an all-to-all backend" in found["static", True].words
    (mark,) = plan.made_for
    assert (mark.dispatch, mark.a2a_backend) == ("dynamic", "none")


@pytest.mark.slow
def test_a_rule_that_the_goal_names_is_kept(tmp_path: Path) -> None:
    for rule, backend, solver_rule in (
        ("static", "deepep", "static"),
        ("lp", "mooncake", "near_lp"),
        ("dynamic", "deepep", "near_dynamic"),
        ("dynamic", "none", "dynamic"),
    ):
        plan = plan_of(tmp_path, f"  dispatch: {rule}\n  a2a_backend: {backend}\n")
        (only,) = compared(plan).values()
        assert (only.dispatch, only.rule) == (rule, solver_rule)
        (mark,) = plan.made_for
        assert (mark.dispatch, mark.a2a_backend) == (rule, backend)
        verified = VerifiedPlacement(plan=plan, decision=present(plan.decision))
        (script,) = (
            file.text for file in emit_placement("sglang", verified) if str(file.path) == "run.sh"
        )
        assert f"--moe-a2a-backend {backend}" in script
        assert f"--ep-dispatch-algorithm {rule}" in script
        assert f"# Made for sglang 0.5.23, 4 nodes, EP 16, dispatch {rule}" in script
        notes = [note for note in plan.provenance.notes if "leave out what the rule costs" in note]
        assert len(notes) == (rule == "lp")
        assert all("a linear program in every layer" in note for note in notes)


def test_every_target_is_marked_for_itself(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, emit="trtllm, eplb")
    assert not compared(plan)
    assert [(one.engine, one.dispatch, one.ep_size) for one in plan.made_for] == [
        ("trtllm", "", 16),
        ("eplb", "", 16),
    ]
    verified = VerifiedPlacement(plan=plan, decision=present(plan.decision))
    (text, *_) = (file.text for file in emit_placement("trtllm", verified))
    assert "Made for trtllm 1.3.0rc27, 4 nodes, EP 16: plan again" in text
    assert "Made for eplb" not in text


@pytest.mark.slow
def test_a_second_target_states_no_load_of_another_rule(tmp_path: Path) -> None:
    for emit, goal, marks, unevaluated in (
        ("trtllm, sglang", "", {"sglang": ("dynamic", "none"), "trtllm": ("", "")}, set()),
        (
            "trtllm, sglang",
            "  a2a_backend: deepep\n",
            {"sglang": ("dynamic", "deepep")},
            {"sglang"},
        ),
        ("sglang, trtllm", "", {"sglang": ("dynamic", "deepep"), "trtllm": ("", "")}, {"trtllm"}),
        ("eplb, sglang", "  dispatch: static\n", {"sglang": ("static", "deepep")}, set()),
    ):
        plan = plan_of(tmp_path, goal, emit=emit)
        found = {one.engine: (one.dispatch, one.a2a_backend) for one in plan.made_for}
        said = {one.engine for one in plan.made_for if not one.is_judged}
        verified = VerifiedPlacement(plan=plan, decision=present(plan.decision))
        for engine in emit.split(", "):
            text = "".join(file.text for file in emit_placement(engine, verified) if file.text)
            states = (
                "Expected of workload" in text,
                "Verdict:" in text,
                "NOT EVALUATED" not in text,
            )
            assert engine == "eplb" or states == (engine not in unevaluated,) * 3, (
                emit,
                goal,
                engine,
                states,
            )
            noted = any(
                note.startswith(f"{engine} runs") and note.endswith("nothing was evaluated here")
                for note in plan.provenance.notes
            )
            assert noted == (engine in unevaluated), (emit, goal, engine, plan.provenance.notes)
        assert marks.items() <= found.items(), (emit, goal, found, said)
        assert said == unevaluated, (emit, goal, found, said)


@each_row(
    ("goal", "model", "emit", "said"),
    [
        ("  dispatch: lp\n", "", "trtllm", "goal.dispatch: trtllm has no rule 'lp'; it runs dynam"),
        (
            "  dispatch: static\n",
            "",
            "trtllm",
            "trtllm has no rule 'static'; it runs dynamic, even",
        ),
        (
            "  dispatch: static\n  a2a_backend: none\n",
            "deepseek-v2-lite",
            "sglang",
            "runs 'static' with an all-to-all backend only, not with goal.a2a_backend none",
        ),
        (
            "  dispatch: lp\n",
            "olmoe-1b-7b",
            "sglang",
            "not for OlmoeForCausalLM; say static or dynamic",
        ),
        (
            "  a2a_backend: nccl\n",
            "deepseek-v2-lite",
            "sglang",
            "sglang has no 'nccl'; it has deepep",
        ),
        ("  a2a_backend: deepep\n", "", "eplb", "no engine under emit asks for one (sglang does)"),
    ],
)
def test_rules_that_an_engine_lacks_are_refused_in_one_line(
    goal: str, model: str, emit: str, said: str, tmp_path: Path
) -> None:
    with refused(SpecError, said):
        read_place_spec(spec_file(tmp_path, goal, model=model, emit=emit))
