"""Candidates as a data frame, whose CSV `moetune plan --csv` writes."""

from pathlib import Path

from tuner.goals.registry import read_any_plan, read_verified
from tuner.plans.serve import FrontPoint
from tuner.plans.train import Plan
from tuner.verify.records import Verified

EXAMPLES = Path(__file__).parents[3] / "examples"
HEADERS = {
    "train-mixtral": "kind,decision,step_time_s,step_time_s_low,step_time_s_high,"
    "tokens_per_s_per_device,peak_memory_bytes,cost_per_step,ratio_low,ratio_high,within_band,"
    "lost_by",
    "serve-mixed-pool": ",".join(FrontPoint.model_fields),
    "place-balance": "workload,imbalance_before,imbalance_rule,imbalance_after,before_s,rule_s,"
    "after_s",
}


def test_columns_are_a_contract() -> None:
    for name, header in HEADERS.items():
        candidates = read_any_plan(EXAMPLES / "checks" / name).candidates()
        assert candidates.to_csv(index=False).splitlines()[0] == header
        assert "object" not in candidates.dtypes.astype(str).tolist()
    assert read_any_plan(EXAMPLES / "checks" / "train-infeasible").candidates().empty


def test_the_plan_is_first_and_says_what_its_prediction_says() -> None:
    plan = read_any_plan(EXAMPLES / "checks" / "train-mixtral")
    assert isinstance(plan, Plan)
    assert plan.predicted is not None
    candidates = plan.candidates()
    first = candidates.iloc[0]
    assert (first["kind"], first["step_time_s"]) == ("plan", plan.predicted.step_time_s)
    assert first["peak_memory_bytes"] == max(plan.predicted.peak_memory_bytes)
    others = candidates[candidates["kind"] == "alternative"]
    assert others["lost_by"].tolist() == [one.lost_by for one in plan.alternatives]
    assert others["within_band"].tolist() == [one.within_band for one in plan.alternatives]
    assert others["ratio_low"].tolist() == [(one.ratio_band or [0])[0] for one in plan.alternatives]


def test_trials_of_a_folder_are_a_frame_with_the_fields_of_their_decisions() -> None:
    verified = read_verified(EXAMPLES / "profiles" / "epyc-quickstart-1" / "plan.json")
    assert isinstance(verified, Verified)
    trials = verified.trials()
    assert len(trials) == len(verified.trials)
    assert trials["measured_step_s"].tolist() == [one.measured_step_s for one in verified.trials]
    assert trials["decision.pipeline_model_parallel_size"].dtype == "int64"
    assert read_verified(EXAMPLES / "checks" / "serve-mixed-pool") is None
