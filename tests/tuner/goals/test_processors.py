"""A deployment on processors: priced on their profile, emitted for vLLM's build for them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from profilers.records import Case, Measurement
from profilers.store import read_profile, write_profile
from tests.expect import present
from tests.profilers.testing import fake_machine, fake_profile
from tuner import api
from tuner.costs.serve.residual import LatencyResidual, ServeResidual
from tuner.errors import SpecError
from tuner.verify.deployments.conclusion import conclude

MODEL = Path(__file__).parents[3] / "examples" / "models" / "tiny-moe" / "config.json"

RESIDUAL = ServeResidual(
    engine="vllm",
    release="0.32.0",
    ttft=LatencyResidual(factor=1.5, spread=1.2),
    tpot=LatencyResidual(factor=0.8, spread=1.1),
    num_deployments=3,
)


def written(path: Path, *, goal: dict[str, Any], emit: list[str]) -> Path:
    pool = {"name": "here", "device": "cpu", "nodes": 1, "devices_per_node": 2}
    keys = {
        "schema_version": 1,
        "model": str(MODEL),
        "cluster": {"pools": [pool | {"memory_per_device": "4GiB", "nic": "1GB/s"}]},
        "goal": goal,
        "emit": emit,
    }
    path.write_text(yaml.safe_dump(keys))
    return path


def deployment(tmp_path: Path, *, emit: Sequence[str] = ("vllm", "local"), **changes: Any) -> Path:
    goal = {
        "kind": "serve",
        "engine": {"name": "vllm"},
        "traffic": {"rate": "1/s", "input_tokens": 256, "output_tokens": 32},
        "slo": {"ttft": {"p90": "5s"}, "tpot": {"p90": "500ms"}},
        "max_model_len": 1024,
    }
    return written(tmp_path / "spec.yaml", goal=goal | changes, emit=list(emit))


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory, formula_s: Callable[[Case], float]) -> Path:
    """The sizes that the spec looks up, and copies, on two ranks."""
    folder = tmp_path_factory.mktemp("profile")
    wanted = api.wanted_sizes(deployment(folder))
    assert wanted.unmeasured == ()
    cases = (
        *wanted.cases,
        *(
            Case(operation="copy", kind="device", axes={"bytes": 2**power})
            for power in (16, 20, 24)
        ),
    )
    rows = [Measurement(case=case, times_s=(formula_s(case),)) for case in cases]
    write_profile(folder / "profile", fake_profile(rows, machine=fake_machine(world=2)))
    return folder / "profile"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, profile: Path) -> api.Deployed:
    return api.deploy(deployment(tmp_path_factory.mktemp("made")), profiles=profile)


def test_every_kernel_that_a_step_runs_can_be_measured(profile: Path) -> None:
    measured = {one.case.operation for one in read_profile(profile).measurements}
    assert measured == {"gemm", "grouped_gemm", "attention", "decode_attention", "copy"}


def test_a_deployment_is_planned_on_the_profile_and_started_by_the_build_for_processors(
    tmp_path: Path, made: api.Deployed
) -> None:
    (group,) = present(made.plan.decision).instances
    assert (group.ep, group.pp, group.attention_dp) == (1, 1, 1)
    api.write(tmp_path / "plan", made)
    script = (tmp_path / "plan" / "launch" / "vllm" / "aggregated.sh").read_text()
    (space,) = (line for line in script.splitlines() if "VLLM_CPU_KVCACHE_SPACE" in line)
    assert 1 <= int(space.partition("=")[2]) <= 4
    assert "--enable-expert-parallel" not in script
    local = (tmp_path / "plan" / "launch" / "local" / "local.sh").read_text()
    assert 'VLLM_CPU_OMP_THREADS_BIND="$3"' in local
    bound = "'0|1'" if group.devices == 2 else "0"
    assert f"start aggregated 30000 {bound}\n" in local


def test_what_no_release_runs_there_is_no_mode(tmp_path: Path, profile: Path) -> None:
    made = api.deploy(deployment(tmp_path, modes=["attention_expert"]), profiles=profile)
    assert made.plan.decision is None


def test_disaggregated_ranks_need_a_machine_each(tmp_path: Path, profile: Path) -> None:
    spec = deployment(tmp_path, modes=["aggregated", "disaggregated", "shared_device"])
    made = api.deploy(spec, profiles=profile)
    assert made.plan.decision is not None
    assert made.plan.decision.mode == "aggregated"
    (row,) = (one for one in made.plan.modes if one.mode == "disaggregated")
    assert "all ranks of a machine compute on the last cores" in row.told
    (row,) = (one for one in made.plan.modes if one.mode == "shared_device")
    assert "mode shared_device is not one of aggregated, disaggregated" in row.told
    keys = yaml.safe_load(deployment(tmp_path, modes=["disaggregated"]).read_text())
    keys["cluster"]["pools"][0] |= {"nodes": 2, "devices_per_node": 1}
    spec.write_text(yaml.safe_dump(keys))
    made = api.deploy(spec, profiles=profile)
    assert made.plan.decision is not None
    aggregated = api.deploy(deployment(tmp_path, modes=["aggregated"]), profiles=profile).plan
    # Half of each core polls for the transfer; aggregated, tokens wait for prompts instead.
    assert (
        1.3
        <= present(made.plan.predicted).tpot_s.p50 / present(aggregated.predicted).tpot_s.p50
        <= 2.1
    )
    assert any("measure before relying on it" in one for one in made.plan.provenance.notes)
    api.write(tmp_path / "plan", made)
    for role in ("prefill", "decode"):
        script = (tmp_path / "plan" / "launch" / "vllm" / f"{role}.sh").read_text()
        assert '"kv_connector": "NixlConnector"' in script
        assert '"kv_buffer_device": "cpu"' in script
    # A decode instance that is estimated has half of each core, too.
    served = "vllm serve m --max-num-seqs 8 --gpu-memory-utilization 0.5"
    seconds = {}
    for name, connector in (
        ("decode", '{"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}'),
        ("aggregated", None),
    ):
        launch = served if connector is None else f"{served} --kv-transfer-config '{connector}'"
        load = present(api.estimate_serving(spec, launch=launch, profiles=profile).load)
        seconds[name] = present(load.tpot_s).p50
    assert 1.3 <= seconds["decode"] / seconds["aggregated"] <= 2.1


def test_a_plan_holds_its_profile_and_stands_for_it(tmp_path: Path, made: api.Deployed) -> None:
    api.write(tmp_path / "plan", made)
    assert (tmp_path / "plan" / "used" / "profile" / "gemm.parquet").is_file()
    again = api.deploy(made.spec.path, profiles=tmp_path / "plan")
    assert again.plan.decision == made.plan.decision
    assert again.plan.predicted == made.plan.predicted


def test_what_launches_said_corrects_later_plans(tmp_path: Path, made: api.Deployed) -> None:
    api.write(tmp_path / "plan", made)
    verified = conclude(made.plan, ()).model_copy(update={"residual": RESIDUAL})
    (tmp_path / "plan" / "verified.json").write_text(verified.model_dump_json())
    again = api.deploy(made.spec.path, profiles=tmp_path / "plan").plan
    assert again.provenance.residual == RESIDUAL
    notes = " ".join(again.provenance.notes)
    assert "corrected by 3 deployments of vllm 0.32.0: TTFT x 1.5, TPOT x 0.8" in notes
    assert "priced by torch's kernels" in notes
    assert present(again.predicted).ttft_s.mean == pytest.approx(
        1.5 * present(made.plan.predicted).ttft_s.mean
    )
    assert present(again.predicted).tpot_s.mean == pytest.approx(
        0.8 * present(made.plan.predicted).tpot_s.mean
    )
    low, high = present(again.predicted).tpot_s_band
    assert high / low == pytest.approx(1.1**2)


def test_processors_are_not_planned_without_their_profile(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="processors have no datasheet; measure one"):
        api.plan(deployment(tmp_path))
    goal = {"kind": "train", "sequence_length": 128, "global_batch_size": 8}
    training = written(tmp_path / "train.yaml", goal=goal, emit=["megatron-lm"])
    with pytest.raises(SpecError, match="a processor has no datasheet to plan training"):
        api.plan(training)


def test_a_training_plan_stands_for_its_profile_alone(tmp_path: Path) -> None:
    stored = Path(__file__).parents[3] / "examples" / "profiles" / "epyc-quickstart-1"
    plan = api.deploy(deployment(tmp_path), profiles=stored).plan
    assert plan.decision is not None
    assert plan.provenance.residual is None


def test_the_given_profile_counts_before_the_pool_s_own(
    tmp_path: Path, profile: Path, made: api.Deployed
) -> None:
    api.write(tmp_path / "plan", made)
    keys = yaml.safe_load(made.spec.path.read_text())
    keys["cluster"]["pools"][0]["profile"] = str(profile)
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(keys))
    verified = conclude(made.plan, ()).model_copy(update={"residual": RESIDUAL})
    (tmp_path / "plan" / "verified.json").write_text(verified.model_dump_json())
    assert api.deploy(tmp_path / "spec.yaml").plan.provenance.residual is None
    given = api.deploy(tmp_path / "spec.yaml", profiles=tmp_path / "plan").plan
    assert given.provenance.residual == RESIDUAL


def test_what_ifs_of_a_corrected_plan_are_corrected(tmp_path: Path, profile: Path) -> None:
    made = api.deploy(deployment(tmp_path), profiles=profile, residual=RESIDUAL)
    api.write(tmp_path / "plan", made)
    again = api.what_ifs(tmp_path / "plan", ())
    mean_s = present(made.plan.predicted).ttft_s.mean
    assert again.base.figures["ttft_mean_s"] == pytest.approx(mean_s)
