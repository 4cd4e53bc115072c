import re
import subprocess
from pathlib import Path

import pytest

from tests.expect import present
from tests.rows import each_row
from tuner.errors import SpecError
from tuner.regress.checks import scenario_then
from tuner.regress.scenarios import read_checks
from tuner.regress.versions import find_other_version
from tuner.regress.workers import OWN_TREE

PACKAGES = ("tuner", "solvers", "profilers")


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments],
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()


def committed(folder: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    if not (folder / ".git").exists():
        git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "change")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def users(tmp_path: Path) -> Path:
    """A repository of checks; its first commit has one spec more."""
    folder = tmp_path / "users"
    folder.mkdir()
    committed(folder, {"checks/a/spec.yaml": "first\n", "models/config.json": "{}"})
    committed(folder, {"checks/a/spec.yaml": "second\n"})
    return folder


def test_a_revision_of_the_user_s_repository_brings_its_scenarios(
    users: Path, tmp_path: Path
) -> None:
    other = find_other_version("git:HEAD~1", checks=users / "checks", scratch=tmp_path)
    assert (present(other.checks) / "a" / "spec.yaml").read_text() == "first\n"
    assert (present(other.checks).parent / "models" / "config.json").is_file()
    assert other.tree == OWN_TREE
    assert other.name.startswith("git:HEAD~1 (")
    assert (users / "checks/a/spec.yaml").read_text() == "second\n"


def test_a_revision_of_moetune_itself_plans_today_s_scenarios(tmp_path: Path) -> None:
    repository = tmp_path / "moetune"
    repository.mkdir()
    files = {f"{package}/__init__.py": "old" for package in PACKAGES}
    committed(repository, {**files, "checks/a/spec.yaml": "a", "big/file": "left out"})
    other = find_other_version("git:HEAD", checks=repository / "checks", scratch=tmp_path)
    assert other.checks is None
    assert sorted(each.name for each in other.tree.iterdir()) == sorted(PACKAGES)
    assert (other.tree / "tuner/__init__.py").read_text() == "old"
    assert other.names == {"a"}


@each_row("revision", ["nowhere", "--upload-pack=x", "HEAD:checks", ""])
def test_what_is_no_revision_is_refused_in_one_line(
    revision: str, users: Path, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match=f"{re.escape(repr(revision))} is no revision of this"):
        find_other_version(f"git:{revision}", checks=users / "checks", scratch=tmp_path)


def test_checks_that_were_not_there_yet_are_said_to_be_so(users: Path, tmp_path: Path) -> None:
    committed(users, {"later/a/spec.yaml": "a"})
    with pytest.raises(SpecError, match="was not there yet"):
        find_other_version("git:HEAD~1", checks=users / "later", scratch=tmp_path)


def test_folders_are_a_version_or_accepted_plans(users: Path, tmp_path: Path) -> None:
    other = find_other_version(str(users / "checks"), checks=users / "checks", scratch=tmp_path)
    assert other.plans == users / "checks"
    for package in PACKAGES:
        (tmp_path / "v" / package).mkdir(parents=True)
        (tmp_path / "v" / package / "__init__.py").write_text("")
    version = find_other_version(str(tmp_path / "v"), checks=users / "checks", scratch=tmp_path)
    assert (version.tree, version.plans) == (tmp_path / "v", None)
    with pytest.raises(SpecError, match="neither a checkout of moetune"):
        find_other_version(str(tmp_path / "v" / "tuner"), checks=users / "checks", scratch=tmp_path)


def test_a_folder_without_a_repository_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    with pytest.raises(SpecError, match="not a git repository"):
        find_other_version("git:HEAD", checks=tmp_path, scratch=tmp_path)


def test_a_history_that_was_cut_off_is_said_to_be_so(users: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "-q", "--depth", "1", users.as_uri(), "clone")
    with pytest.raises(SpecError, match=r"cut off: fetch it with .*fetch-depth: 0 on GitHub"):
        find_other_version("git:HEAD~1", checks=tmp_path / "clone" / "checks", scratch=tmp_path)


def test_files_that_a_partial_clone_lacks_are_said_to_be_missing(
    users: Path, tmp_path: Path
) -> None:
    git(users, "config", "uploadpack.allowFilter", "true")
    git(tmp_path, "clone", "-q", "--filter=blob:none", users.as_uri(), "clone")
    users.rename(tmp_path / "away")
    with pytest.raises(SpecError, match="are not all there: fetch them first"):
        find_other_version("git:HEAD~1", checks=tmp_path / "clone" / "checks", scratch=tmp_path)


def test_a_single_scenario_is_found_in_a_revision(users: Path, tmp_path: Path) -> None:
    single = users / "checks" / "a"
    other = find_other_version("git:HEAD~1", checks=single, scratch=tmp_path)
    (scenario,) = read_checks(single).scenarios
    assert present(scenario_then(scenario, other)).spec.read_text() == "first\n"
