"""The product as functions: which profile, what is refused, what is noted, and the whole chain."""

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from profilers.errors import ProfileUnreadableError
from profilers.machine import fingerprint
from profilers.records import Profile
from profilers.store import write_header
from tests.profilers.testing import fake_machine, fake_profile
from tests.rows import each_row
from tests.tuner.verify.testing import FakeLauncher
from tuner import api
from tuner.errors import OutsideProfileError, PlanUnreadableError, SpecError, UnknownDeviceError
from tuner.goals.train_folder import read_plan, write_plan
from tuner.goals.train_spec import read_spec
from tuner.plans.folder import VERIFIED_NAME
from tuner.spec.huggingface.read import read_model
from tuner.verify.records import Verified
from tuner.verify.verification import Effort, Watcher

Launcher = Callable[..., FakeLauncher]
Spec = Callable[..., Path]
Store = Callable[[Path, Profile], Path]

EXAMPLES = Path(__file__).parents[2] / "examples"
SILENT = Watcher(started=lambda _decision, _seconds: None, ended=lambda _record: None)
SMALL: dict[str, Any] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "micro_batch_size": 2,
    "zero_stage": 0,
    "recompute": "none",
}
"""A handful of candidates."""


def _plan(spec: Path, *profiles: Path) -> api.Planned:
    return api.plan_training(spec, profiles=profiles)


def _on(profile: Profile, **changes: Any) -> Profile:
    """The same measurements on another machine."""
    machine = profile.header.machine.model_copy(update=changes)
    header = profile.header.model_copy(update={"machine": machine})
    return profile.model_copy(update={"header": header})


def test_from_a_profile_to_verified_launch_files(
    bound_spec: Path, tmp_path: Path, hidden_launcher: Launcher
) -> None:
    folder = tmp_path / "plan"
    made = _plan(bound_spec)
    written = write_plan(folder, made.plan, spec=made.spec, profiles=made.profiles)
    assert written.certificate.status == "optimal"
    assert all((folder / name).is_file() for name in written.files)
    scripts = [folder / name for name in written.files if name.endswith((".sh", ".sbatch"))]
    assert len(scripts) == 3
    assert all("NOT VERIFIED" in script.read_text() for script in scripts)

    launcher = hidden_launcher(folder, noise_ratio=0.01)
    found = api.verify(
        folder,
        effort=Effort(trials=8, steps=5),
        resume=False,
        watcher=SILENT,
        launch=launcher,
    )
    assert Verified.model_validate_json((folder / VERIFIED_NAME).read_bytes()) == found
    assert read_plan(folder) == written
    for script in scripts:
        text = script.read_text()
        assert "NOT VERIFIED" not in text
        assert "Verified by launching the reference training step; trials: 8" in text
        assert script.stat().st_mode & 0o111
    # What is handed over is the winner, on as many devices as were planned.
    step = json.loads((folder / "launch/reference/step.json").read_text())
    assert found.winner is not None
    assert [stage["chunks"] for stage in step["stages"]] == list(found.winner.chunks)
    degrees = step["parallelism"]
    assert degrees["tensor"] * degrees["pipeline"] * degrees["data"] == 2
    assert found.winner.num_devices == 2


def test_a_launch_hears_of_each_start_and_end(planned: Path, hidden_launcher: Launcher) -> None:
    heard: list[str] = []
    watcher = Watcher(
        started=lambda _decision, seconds: heard.append(f"started {seconds > 0}"),
        ended=lambda record: heard.append(f"ended {record.status}"),
    )
    launcher = hidden_launcher(planned, ends={1: "timeout"})
    effort = Effort(trials=2, steps=3)
    api.verify(planned, effort=effort, resume=False, watcher=watcher, launch=launcher)
    assert heard == ["started True", "ended ok", "started True", "ended timeout"]


def test_verification_on_another_machine_says_what_differs(
    planned: Path, hidden_launcher: Launcher
) -> None:
    found = api.verify(
        planned,
        effort=Effort(trials=1, steps=3),
        resume=False,
        watcher=SILENT,
        launch=hidden_launcher(planned),
    )
    (note,) = found.notes
    here = fingerprint(device_kind="cpu", world=1, local_world=1).device
    assert "another machine" in note
    assert f"device: {here!r} here, 'Fake 9000' there" in note


def test_a_plan_without_a_decision_cannot_be_verified(
    tiny_spec: Spec, analytic_profile: Profile, store_profile: Store, tmp_path: Path
) -> None:
    spec = tiny_spec(pool={"memory_per_device": "1MiB"}, search=SMALL)
    store_profile(tmp_path / "profile", analytic_profile)
    made = _plan(spec)
    assert made.plan.decision is None
    assert made.plan.relaxations[0].limit == "memory_per_device"
    folder = tmp_path / "plan"
    write_plan(folder, made.plan, spec=made.spec, profiles=made.profiles)
    with pytest.raises(PlanUnreadableError, match=r"nothing to launch \(memory_per_device\)"):
        api.verify(folder, effort=Effort(trials=1, steps=3), resume=False, watcher=SILENT)


def test_the_given_profile_goes_before_that_of_the_spec(
    tiny_spec: Spec, analytic_profile: Profile, store_profile: Store, tmp_path: Path
) -> None:
    spec = tiny_spec(search=SMALL)
    other = store_profile(tmp_path / "other", _on(analytic_profile, hostname="elsewhere"))
    assert _plan(spec, other).profiles == {"here": other}


def test_profiles_are_matched_by_device(
    tiny_spec: Spec, analytic_profile: Profile, store_profile: Store, tmp_path: Path
) -> None:
    one = store_profile(tmp_path / "one", _on(analytic_profile, device="NVIDIA H100 80GB"))
    two = store_profile(tmp_path / "two", _on(analytic_profile, device="NVIDIA H200"))
    spec = tiny_spec(pool={"device": "h200"}, search=SMALL)
    assert _plan(spec, one, two).profiles == {"here": two}
    assert _plan(spec, two, one).profiles == {"here": two}
    missing = tiny_spec(pool={"device": "B200"}, search=SMALL)
    with pytest.raises(SpecError, match=r"'B200'; the profiles given are of 'NVIDIA H100 80GB', "):
        _plan(missing, one, two)


def test_several_profiles_need_a_device_to_choose_by(
    tiny_spec: Spec, analytic_profile: Profile, store_profile: Store, tmp_path: Path
) -> None:
    one = store_profile(tmp_path / "one", analytic_profile)
    two = store_profile(tmp_path / "two", analytic_profile)
    with pytest.raises(SpecError, match=r"'here' names no device to choose one of 2 profiles"):
        _plan(tiny_spec(search=SMALL), one, two)


def test_a_single_profile_of_another_device_is_noted(
    tiny_spec: Spec, analytic_profile: Profile, store_profile: Store, tmp_path: Path
) -> None:
    store_profile(tmp_path / "profile", analytic_profile)
    notes = _plan(tiny_spec(pool={"device": "H200"}, search=SMALL)).plan.provenance.notes
    assert "the profile was measured on 'Fake 9000', the pool says 'H200'" in notes


def test_a_pool_without_profile_is_planned_on_its_datasheet(tiny_spec: Spec) -> None:
    spec = tiny_spec(
        pool={"profile": None, "device": "H200", "memory_per_device": None}, search=SMALL
    )
    made = api.plan_training(spec)
    assert not made.profiles
    assert made.plan.decision is not None
    assert set(made.plan.provenance.profile_source.values()) == {"datasheet"}


def test_an_unknown_device_is_named_with_those_that_are_known(tiny_spec: Spec) -> None:
    spec = tiny_spec(pool={"profile": None, "device": "H2000"}, search=SMALL)
    with pytest.raises(UnknownDeviceError, match=r"H2000.*h200"):
        api.plan(spec)


def test_a_missing_profile_names_its_place(tiny_spec: Spec, tmp_path: Path) -> None:
    with pytest.raises(ProfileUnreadableError, match="profile does not exist"):
        _plan(tiny_spec(search=SMALL))
    with pytest.raises(ProfileUnreadableError, match="nowhere does not exist"):
        _plan(tiny_spec(search=SMALL), tmp_path / "nowhere")


def test_an_empty_profile_has_no_price_and_says_how_to_get_one(
    tiny_spec: Spec, store_profile: Store, tmp_path: Path
) -> None:
    store_profile(tmp_path / "profile", fake_profile([]))
    with pytest.raises(OutsideProfileError, match=r"measure it with `moetune profile --for"):
        _plan(tiny_spec(search=SMALL))


@each_row("lacking", ["grouped_gemm", "attention", "collective", "optimizer"])
def test_an_operation_that_was_never_measured_is_named(
    tiny_spec: Spec,
    analytic_profile: Profile,
    store_profile: Store,
    tmp_path: Path,
    lacking: str,
) -> None:
    rows = [row for row in analytic_profile.measurements if row.case.operation != lacking]
    store_profile(tmp_path / "profile", fake_profile(rows))
    with pytest.raises(OutsideProfileError, match=rf"no {lacking}\b.*moetune profile --for"):
        _plan(tiny_spec(search=SMALL))


def test_several_pools_are_refused_in_one_line(tiny_spec: Spec) -> None:
    path = tiny_spec()
    spec = yaml.safe_load(path.read_text())
    spec["cluster"]["pools"].append(spec["cluster"]["pools"][0] | {"name": "there"})
    path.write_text(yaml.safe_dump(spec))
    for question in (api.plan, api.wanted_sizes):
        with pytest.raises(
            SpecError,
            match="'here', 'there': a profile of the reference step plans one pool; keep one",
        ):
            question(path)


def test_latent_attention_is_refused_in_one_line(tiny_spec: Spec, tmp_path: Path) -> None:
    path = tiny_spec()
    example = Path(__file__).parents[2] / "examples" / "models" / "deepseek-v3" / "config.json"
    (tmp_path / "config.json").write_bytes(example.read_bytes())
    assert read_model(tmp_path / "config.json").attention.kind == "mla"
    for question in (api.plan, api.wanted_sizes):
        with pytest.raises(SpecError, match="latent attention, which a profile of the reference"):
            question(path)


def test_what_the_reader_must_know_is_noted(
    tiny_spec: Spec, analytic_profile: Profile, store_profile: Store, tmp_path: Path
) -> None:
    tables = dict(analytic_profile.header.tables)
    tables["storage"] = tables["gemm"].model_copy(
        update={"rows": 0, "complete": False, "note": "the budget was spent"}
    )
    fewer = _on(analytic_profile, world=2, oversubscribed=True)
    header = fewer.header.model_copy(update={"tables": analytic_profile.header.tables | tables})
    write_header(store_profile(tmp_path / "profile", fewer), header)
    provenance = _plan(tiny_spec(search=SMALL)).plan.provenance
    said = "\n".join(provenance.notes)
    assert "routing is assumed balanced: no recording was given (goal.routing)" in said
    assert "collectives were measured over 2 ranks, the plan uses up to 4" in said
    assert "more ranks than cores" in said
    assert "table storage: the budget was spent" in said
    assert "error band: no run of this engine" in said
    assert provenance.profile_source == {"here": "measured"}
    assert provenance.device_kind == {"here": "cpu"}
    assert len(provenance.profile_sha256["here"]) == 64


def test_the_memory_that_may_be_used_is_the_pools_or_the_machines(
    tiny_spec: Spec, analytic_profile: Profile
) -> None:
    own = read_spec(tiny_spec(pool={"memory_per_device": "1GiB"})).cluster.pools[0]
    assert api.machine_of(own, analytic_profile).memory_limit_bytes == int(2**30 * 0.95)
    whole = {"memory_per_device": None, "usable_memory_ratio": 1.0}
    machines = read_spec(tiny_spec(pool=whole)).cluster.pools[0]
    assert api.machine_of(machines, analytic_profile).memory_limit_bytes == (
        fake_machine().memory_bytes_per_device
    )


def test_every_size_that_planning_asks_for_is_listed_beforehand(
    tiny_spec: Spec, profile_for: Callable[[Path], Profile], store_profile: Store, tmp_path: Path
) -> None:
    spec = tiny_spec(search=SMALL)
    asked = {case.id for case in api.wanted_sizes(spec).cases}
    measured = profile_for(spec).measurements
    # How long ranks work before they meet follows from prices; those sizes are never listed.
    rows = [row for row in measured if row.case.id in asked or row.case.operation == "rendezvous"]
    store_profile(tmp_path / "profile", fake_profile(rows, machine=fake_machine(world=4)))
    assert _plan(spec).plan.provenance.extrapolated == ()


PLACE = f"""\
schema_version: 1
goal:
  kind: place
  ranks: 8
  slots_per_rank: 4
  workloads: [{{name: python, path: {EXAMPLES}/routing/python}}]
"""


def test_one_function_plans_and_one_writes_any_goal(tiny_spec: Spec, tmp_path: Path) -> None:
    kinds: dict[str, Any] = {"train": api.Planned, "serve": api.Deployed, "place": api.Placed}
    specs = {
        "train": tiny_spec(
            pool={"profile": None, "device": "H200", "memory_per_device": None}, search=SMALL
        ),
        "serve": EXAMPLES / "checks" / "serve-aggregated" / "spec.yaml",
        "place": tmp_path / "place.yaml",
    }
    specs["place"].write_text(PLACE, encoding="utf-8")
    for goal, spec in specs.items():
        made = api.plan(str(spec), time_limit_s=2.0, with_unlaunchable=False)
        assert isinstance(made, kinds[goal]), goal
        folder = f"{tmp_path}/{goal}"
        written = api.write(folder, made)
        assert written.goal.kind == goal
        # By its folder and by its file, as a path and as text.
        for plan in (folder, f"{folder}/plan.json", Path(folder) / "plan.json"):
            assert api.read_any_plan(plan) == written


def test_every_path_of_the_api_may_be_text() -> None:
    """What takes a path says so in its annotations: each must take text as well."""
    rigid = []
    for name, function in vars(api).items():
        if not inspect.isfunction(function):
            continue
        for parameter, said in inspect.get_annotations(function).items():
            # Folders that a plan's maker found are values, and what is returned is a path.
            if parameter == "return" or "Path" not in str(said):
                continue
            if "str" not in str(said) and "AnyPath" not in str(said):
                rigid.append(f"{name}({parameter}: {said})")
    assert not rigid, "\n".join(rigid)


def test_a_profile_may_stand_for_a_list_of_one(
    tiny_spec: Spec, analytic_profile: Profile, store_profile: Store, tmp_path: Path
) -> None:
    one = store_profile(tmp_path / "one", analytic_profile)
    spec = tiny_spec(search=SMALL)
    made = api.plan(str(spec), profiles=str(one))
    assert isinstance(made, api.Planned)
    assert made.profiles == {"here": one}
    assert made.plan.decision == api.plan(spec, profiles=[one]).plan.decision
