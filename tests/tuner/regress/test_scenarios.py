from pathlib import Path
from tempfile import mkdtemp

import pytest

from tests.rows import each_row
from tuner.errors import SpecError, TunerError
from tuner.regress.scenarios import index_json, measured_profiles, read_checks


def scenario(folder: Path, *below: str, spec: str = "goal: {kind: train}\n") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "spec.yaml").write_text(spec)
    for name in below:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")
    return folder


def test_scenarios_are_found_by_name_with_their_profiles_and_plans(tmp_path: Path) -> None:
    scenario(tmp_path / "b", "plan.json", "profile/profile.json")
    scenario(tmp_path / "a", "plan/plan.json", "profiles/h200/profile.json", "profiles/a/x")
    scenario(tmp_path / ".hidden")
    (tmp_path / "no-scenario").mkdir()
    first, second = read_checks(tmp_path).scenarios
    assert (first.name, second.name) == ("a", "b")
    assert first.plan_file == tmp_path / "a" / "plan" / "plan.json"
    assert first.baseline_file == tmp_path / "a" / "plan" / "baseline.json"
    assert [each.name for each in first.profiles] == ["a", "h200"]
    assert second.plan_file == tmp_path / "b" / "plan.json"
    assert second.profiles == (tmp_path / "b" / "profile",)


def test_a_folder_with_a_spec_is_a_single_scenario(tmp_path: Path) -> None:
    checks = read_checks(scenario(tmp_path / "alone"))
    assert checks.is_single
    assert [one.name for one in checks.scenarios] == ["alone"]


def test_a_listed_scenario_that_is_gone_is_noticed(tmp_path: Path) -> None:
    scenario(tmp_path / "a")
    (tmp_path / "scenarios.json").write_text(index_json(["b", "a"]))
    assert read_checks(tmp_path).gone == ("b",)


@each_row("text", ["[]", "{", '{"schema_version": 1}', '{"names": ["a"], "x": 1}'])
def test_a_damaged_index_is_refused(text: str, tmp_path: Path) -> None:
    checks = tmp_path / f"{len(text)} characters"
    scenario(checks / "a")
    (checks / "scenarios.json").write_text(text)
    with pytest.raises(SpecError, match=r"scenarios\.json"):
        read_checks(checks)


def test_a_folder_without_scenarios_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"moetune plan SPEC\.yaml -o"):
        read_checks(tmp_path)
    with pytest.raises(SpecError, match="no such folder"):
        read_checks(tmp_path / "none")


def test_only_named_scenarios_are_kept(tmp_path: Path) -> None:
    scenario(tmp_path / "a")
    scenario(tmp_path / "b")
    checks = read_checks(tmp_path)
    assert checks.only(()) == checks
    assert [one.name for one in checks.only(["b"]).scenarios] == ["b"]
    with pytest.raises(TunerError, match=r"--only 'c' is no scenario .*; there are a, b"):
        checks.only(["c"])


def test_profiles_that_the_spec_names_are_measured_on(tmp_path: Path) -> None:
    spec = "cluster: {pools: [{profile: p}, {profile: absent}, {device: h100}, 3]}\n"
    (only,) = read_checks(scenario(tmp_path / "a", "p/profile.json", spec=spec)).scenarios
    assert measured_profiles(only) == (tmp_path / "a" / "p",)
    (none,) = read_checks(scenario(tmp_path / "b", spec="[]\n")).scenarios
    assert measured_profiles(none) == ()
    (own,) = read_checks(scenario(tmp_path / "c", "profile/profile.json", spec=spec)).scenarios
    assert measured_profiles(own) == (tmp_path / "c" / "profile",)


@each_row("name", ["x\n::error::y", "a\x1b[31m", "byte\udcff", "turned\u202eround"])
def test_a_name_that_cannot_be_printed_is_refused_in_words_that_can(
    name: str, tmp_path: Path
) -> None:
    checks = Path(mkdtemp(dir=tmp_path))
    scenario(checks / name)
    with pytest.raises(SpecError, match="cannot be printed; rename it") as refused:
        read_checks(checks)
    assert str(refused.value).isprintable()
