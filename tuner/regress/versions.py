"""The other version to compare with: a folder, or a revision of a git repository.

    DIR with the package tuner     that version of moetune plans the same scenarios
    DIR with scenarios             the plans that were accepted there
    git:REV                        the repository of the checks at REV: if it is moetune's own, that
                                   version plans the same scenarios; otherwise today's version plans
                                   the scenarios of REV, on their profiles

A revision is checked out into a temporary folder, with an index there: nothing in the repository
changes. REV may be anything that `git rev-parse` understands, e.g. origin/main, or
the merge base: git:$(git merge-base HEAD origin/main).

In all three cases scenarios that are missing today are reported (`OtherVersion.names`), so a change
that drops one together with its line in scenarios.json is noticed.

Not covered: submodules.
"""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tuner.errors import EnvironmentMissingError, SpecError
from tuner.regress.scenarios import SPEC_NAME
from tuner.regress.workers import OWN_TREE
from tuner.spec.files import shown_path

GIT_PREFIX: Final = "git:"
PACKAGES: Final = ("tuner", "solvers", "profilers")
GIT_LIMIT_S: Final = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherVersion:
    """The reference of a check in place of the accepted plans."""

    name: str
    tree: Path
    """Folder with the packages of the moetune version that plans."""
    checks: Path | None
    """Folder of that version's scenarios, which are planned; None: today's."""
    plans: Path | None = None
    """Folder of that version's accepted plans, which are the reference; nothing is planned then."""
    names: frozenset[str] = frozenset()
    """Names of the scenarios that the version has."""


def find_other_version(text: str, *, checks: Path, scratch: Path) -> OtherVersion:
    """Resolve `--against`.

    Raises:
        SpecError: there is no such folder, repository or revision, or nothing to compare with.
        EnvironmentMissingError: git is not installed.
    """
    if text.startswith(GIT_PREFIX):
        return _revision(text.removeprefix(GIT_PREFIX), checks=checks, scratch=scratch)
    folder = Path(text)
    if _is_moetune(folder):
        return OtherVersion(name=text, tree=folder.resolve(), checks=None)
    if folder.is_dir() and (names := _names(folder)):
        return OtherVersion(name=text, tree=OWN_TREE, checks=None, plans=folder, names=names)
    raise SpecError(
        f"--against {text!r}: neither a checkout of moetune (with {', '.join(PACKAGES)}) nor a"
        " folder of scenarios; name one, or git:REV"
    )


def _revision(revision: str, *, checks: Path, scratch: Path) -> OtherVersion:
    top = Path(
        _git(checks, "rev-parse", "--show-toplevel", otherwise="keep CHECKS in a git repository")
    )
    commit = _commit(revision, checks=checks)
    tree = scratch / "revision"
    tree.mkdir()
    listed = _git(top, "ls-tree", "--name-only", f"{commit}:").split("\n")
    name = f"git:{revision} ({commit[:12]})"
    below = checks.resolve().relative_to(top.resolve())
    if set(PACKAGES) <= set(listed):
        _extract(top, commit, PACKAGES, into=tree)
        names = _names_then(top, commit, below=below)
        return OtherVersion(name=name, tree=tree, checks=None, names=names)
    _extract(top, commit, (), into=tree)
    if not (tree / below).is_dir():
        raise SpecError(f"--against git:{revision}: {shown_path(checks)} was not there yet")
    return OtherVersion(name=name, tree=OWN_TREE, checks=tree / below, names=_names(tree / below))


def _commit(revision: str, *, checks: Path) -> str:
    is_shallow = _git(checks, "rev-parse", "--is-shallow-repository") == "true"
    otherwise = f"{revision!r} is no revision of this repository"
    if is_shallow:
        otherwise += (
            ", whose history was cut off: fetch it with `git fetch --unshallow`, or have CI do so"
            " (fetch-depth: 0 on GitHub, GIT_DEPTH: 0 on GitLab)"
        )
    wanted = f"{revision}^{{commit}}"
    return _git(checks, "rev-parse", "--verify", "--end-of-options", wanted, otherwise=otherwise)


def _names(folder: Path) -> frozenset[str]:
    return frozenset(file.parent.name for file in folder.glob(f"*/{SPEC_NAME}"))


def _names_then(top: Path, commit: str, *, below: Path) -> frozenset[str]:
    """List the scenarios of a folder in a commit."""
    listed = _git(top, "ls-tree", "-r", "-z", "--name-only", commit, "--", f"{below}/")
    files = (Path(name) for name in listed.split("\0"))
    return frozenset(
        file.parent.name
        for file in files
        if file.name == SPEC_NAME and file.parent.parent == below and file.parent != below
    )


def _is_moetune(folder: Path) -> bool:
    return all((folder / package / "__init__.py").is_file() for package in PACKAGES)


def _git(
    folder: Path,
    *arguments: str,
    otherwise: str = "name a revision that this repository has",
    index: Path | None = None,
) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=GIT_LIMIT_S,
            check=False,
            env=None if index is None else {**os.environ, "GIT_INDEX_FILE": str(index)},
        )
    except FileNotFoundError as error:
        raise EnvironmentMissingError(
            "--against git: needs git; install it (Debian: apt-get install git)"
        ) from error
    if done.returncode != 0:
        said = done.stderr.strip().split("\n")[0] or f"git {arguments[0]} failed"
        raise SpecError(f"--against git: {said}; {otherwise}")
    return done.stdout.strip()


def _extract(top: Path, commit: str, paths: tuple[str, ...], *, into: Path) -> None:
    """Write the files of a commit below a folder, with an index of their own.

    Raises:
        SpecError: git lacks some, as it does in a partial clone.
    """
    _git(
        top,
        "-c",
        "core.hooksPath=/dev/null",
        f"--git-dir={_git(top, 'rev-parse', '--absolute-git-dir')}",
        f"--work-tree={into}",
        "checkout",
        "--quiet",
        commit,
        "--",
        *(paths or (".",)),
        otherwise=f"the files of {commit[:12]} are not all there: fetch them first",
        index=into.with_name("index"),
    )
