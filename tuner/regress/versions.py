"""Another state to compare with: a folder, or a revision of a git repository.

    DIR with the package tuner     that version of moetune plans the same scenarios
    DIR with scenarios             the plans that were accepted there
    git:REV                        the repository that holds the checks, as it was then: where it is
                                   moetune's own, its version plans the same scenarios; otherwise
                                   today's version plans the scenarios of then, on their profiles

A revision is read by `git archive` into a temporary folder: no worktree, no checkout, nothing in
the repository changes. REV may be anything that `git rev-parse` understands, e.g. origin/main, or
the merge base: git:$(git merge-base HEAD origin/main).

Not covered: submodules and files that git LFS keeps elsewhere.
"""

import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from tuner.errors import EnvironmentMissingError, SpecError
from tuner.regress.running import OWN_TREE
from tuner.spec.files import shown_path

GIT_PREFIX: Final = "git:"
PACKAGES: Final = ("tuner", "solvers", "profilers")
LARGEST_TREE_BYTES: Final = 2 * 2**30
MOST_FILES: Final = 200_000
GIT_LIMIT_S: Final = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    """What a check compares with in place of the accepted plans."""

    name: str
    tree: Path
    """Holds the packages of the moetune that plans."""
    checks: Path | None
    """Its scenarios are planned; None: today's."""
    plans: Path | None = None
    """Its accepted plans are taken as they are, and nothing else is planned."""


def other_of(text: str, *, checks: Path, scratch: Path) -> Other:
    """Find what `--against` names.

    Raises:
        SpecError: there is no such folder, repository or revision, or nothing to compare with.
        EnvironmentMissingError: git is not installed.
    """
    if text.startswith(GIT_PREFIX):
        return _revision(text.removeprefix(GIT_PREFIX), checks=checks, scratch=scratch)
    folder = Path(text)
    if _is_moetune(folder):
        return Other(name=text, tree=folder.resolve(), checks=None)
    if folder.is_dir() and any(folder.glob("*/spec.yaml")):
        return Other(name=text, tree=OWN_TREE, checks=None, plans=folder)
    raise SpecError(
        f"--against {text!r}: neither a checkout of moetune (with {', '.join(PACKAGES)}) nor a"
        " folder of scenarios; name one, or git:REV"
    )


def _revision(revision: str, *, checks: Path, scratch: Path) -> Other:
    top = Path(_git(checks, "rev-parse", "--show-toplevel"))
    commit = _git(checks, "rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}")
    tree = scratch / "revision"
    tree.mkdir()
    listed = _git(top, "ls-tree", "--name-only", f"{commit}:").split("\n")
    name = f"git:{revision} ({commit[:12]})"
    if set(PACKAGES) <= set(listed):
        _extract(top, commit, PACKAGES, into=tree)
        return Other(name=name, tree=tree, checks=None)
    _extract(top, commit, (), into=tree)
    below = tree / checks.resolve().relative_to(top.resolve())
    if not below.is_dir():
        raise SpecError(f"--against git:{revision}: {shown_path(checks)} was not there yet")
    return Other(name=name, tree=OWN_TREE, checks=below)


def _is_moetune(folder: Path) -> bool:
    return all((folder / package / "__init__.py").is_file() for package in PACKAGES)


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=GIT_LIMIT_S,
            check=False,
        )
    except FileNotFoundError as error:
        raise EnvironmentMissingError(
            "--against git: needs git; install it (Debian: apt-get install git)"
        ) from error
    if done.returncode != 0:
        said = done.stderr.strip().split("\n")[0] or f"git {arguments[0]} failed"
        raise SpecError(f"--against git: {said}; name a revision that this repository has")
    return done.stdout.strip()


def _extract(top: Path, commit: str, paths: tuple[str, ...], *, into: Path) -> None:
    """Unpack a commit as git streams it, up to a size, nothing outside `into`."""
    with subprocess.Popen(
        ["git", "-C", str(top), "archive", "--format=tar", commit, "--", *paths],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None
        try:
            _unpack(process.stdout, into=into)
        finally:
            process.kill()


def _unpack(stream: IO[bytes], *, into: Path) -> None:
    total, files = 0, 0
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            total, files = total + member.size, files + 1
            if total > LARGEST_TREE_BYTES or files > MOST_FILES:
                raise SpecError(
                    f"--against git: the revision holds more than {LARGEST_TREE_BYTES} bytes or"
                    f" {MOST_FILES} files; keep checks in a smaller repository"
                )
            archive.extract(member, into, filter="data")
