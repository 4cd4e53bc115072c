"""The other version to compare with: a folder, or a revision of a git repository.

    DIR with the package tuner     that version of moetune plans the same scenarios
    DIR with scenarios             the plans that were accepted there
    git:REV                        the repository of the checks at REV: if it is moetune's own, that
                                   version plans the same scenarios; otherwise today's version plans
                                   the scenarios of REV, on their profiles

A revision is read by `git archive` into a temporary folder: no worktree, no checkout, nothing in
the repository changes. REV may be anything that `git rev-parse` understands, e.g. origin/main, or
the merge base: git:$(git merge-base HEAD origin/main).

In all three cases scenarios that are missing today are reported (`OtherVersion.names`), so a change
that drops one together with its line in scenarios.json is noticed.

Not covered: submodules, files that git LFS keeps elsewhere, and links that leave the repository.
"""

import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Final

from tuner.errors import EnvironmentMissingError, SpecError
from tuner.regress.scenarios import SPEC_NAME
from tuner.regress.workers import OWN_TREE
from tuner.spec.files import shown_path

GIT_PREFIX: Final = "git:"
PACKAGES: Final = ("tuner", "solvers", "profilers")
LARGEST_TREE_BYTES: Final = 2 * 2**30
MOST_FILES: Final = 200_000
GIT_LIMIT_S: Final = 300.0
LONGEST_TALK_BYTES: Final = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherVersion:
    """The reference of a check in place of the accepted plans."""

    name: str
    tree: Path
    """Folder with the packages of the moetune version that plans."""
    checks: Path | None
    """Its scenarios are planned; None: today's."""
    plans: Path | None = None
    """Its accepted plans are the reference, and nothing is planned for it."""
    names: frozenset[str] = frozenset()
    """Of the scenarios that it has."""


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
    folder: Path, *arguments: str, otherwise: str = "name a revision that this repository has"
) -> str:
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
        raise SpecError(f"--against git: {said}; {otherwise}")
    return done.stdout.strip()


def _extract(top: Path, commit: str, paths: tuple[str, ...], *, into: Path) -> None:
    """Unpack a commit as git streams it, up to a size, nothing outside `into`.

    Raises:
        SpecError: git stops early, as it does where a partial clone lacks files, or it is too much.
    """
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(
            ["git", "-C", str(top), "archive", "--format=tar", commit, "--", *paths],
            stdout=subprocess.PIPE,
            stderr=said,
        ) as process,
    ):
        assert process.stdout is not None
        try:
            is_whole = _unpack(process.stdout, into=into) and process.wait(GIT_LIMIT_S) == 0
        finally:
            process.kill()
        if not is_whole:
            said.seek(0)
            lines = said.read(LONGEST_TALK_BYTES).decode(errors="replace").strip().split("\n")
            raise SpecError(
                f"--against git: {lines[0] or 'git archive ended early'}; the files of"
                f" {commit[:12]} are not all there: fetch them first"
            )


def _unpack(stream: IO[bytes], *, into: Path) -> bool:
    """Return whether the stream was whole; what leaves the tree is left out.

    Files first, then links, so that nothing is written through a link. The filters of `tarfile`
    would do this too, but the first releases of Python 3.11 lack them.
    """
    total, files = 0, 0
    links: list[tuple[Path, str]] = []
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                total, files = total + member.size, files + 1
                if total > LARGEST_TREE_BYTES or files > MOST_FILES:
                    raise SpecError(
                        f"--against git: the revision holds more than {LARGEST_TREE_BYTES} bytes or"
                        f" {MOST_FILES} files; keep checks in a smaller repository"
                    )
                name = PurePosixPath(member.name)
                if name.is_absolute() or ".." in name.parts:
                    continue
                place = into / name
                place.parent.mkdir(parents=True, exist_ok=True)
                content = archive.extractfile(member) if member.isreg() else None
                if content is not None:
                    with place.open("wb") as file:
                        shutil.copyfileobj(content, file)
                elif member.issym():
                    links.append((place, member.linkname))
    except tarfile.ReadError:
        return False
    _link(links, into=into)
    while stream.read(LONGEST_TALK_BYTES):
        pass  # padding, without which git would not end well
    return True


def _link(links: Sequence[tuple[Path, str]], *, into: Path) -> None:
    """Create links, and remove those that leave the tree or form a cycle."""
    for place, target in links:
        place.symlink_to(target)
    home = into.resolve()
    for place, _ in links:
        try:
            leaves = not place.resolve().is_relative_to(home)
        except (OSError, RuntimeError):
            leaves = True
        if leaves:
            place.unlink()
