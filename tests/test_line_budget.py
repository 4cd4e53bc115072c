"""Groups of modules, called rooms, keep to budgets of statements (`tests/line_budget.toml`).

All rooms together have no spare ratio: code that moves into tests or data does not become less.
`python -m tests.test_line_budget [--since COMMIT]` prints every room beside its budget, with its
lines and files, and what went from the packages into tests and data since a commit.
"""

import argparse
import ast
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
BUDGETS: Final = Path(__file__).with_name("line_budget.toml")
PACKAGES: Final = ("tuner", "solvers", "profilers", "tests")
DATA: Final = frozenset({".csv", ".json", ".toml", ".txt", ".yaml"})
"""Files that statements could move into: each of their lines counts as one."""
DATA_ROOM: Final = "data"
SPARE_RATIO: Final = 0.02
SPARE_STATEMENTS: Final = 40
SHORTEST_LINE: Final = 12
"""Characters below which a line (`return`, `)`) says nothing about where it came from."""


@dataclass(frozen=True)
class Room:
    """Files under one budget."""

    name: str
    globs: tuple[str, ...]
    statements: int

    @property
    def most(self) -> int:
        """Return the most statements that pass."""
        return self.statements + max(int(self.statements * SPARE_RATIO), SPARE_STATEMENTS)


@dataclass
class Size:
    """What files of a room add up to."""

    statements: int = 0
    lines: int = 0
    files: int = 0


def read_rooms() -> tuple[Room, ...]:
    """Read the rooms, in the order in which a file looks for its own."""
    listed = tomllib.loads(BUDGETS.read_text())["room"]
    return tuple(Room(one["name"], tuple(one["globs"]), one["statements"]) for one in listed)


def room_of(path: str, rooms: Iterable[Room]) -> str:
    """Return the name of the first room with a glob that matches.

    Raises:
        LookupError: none has.
    """
    for room in rooms:
        if any(fnmatch(path, glob) for glob in room.globs):
            return room.name
    raise LookupError(f"{path} is in no room of {BUDGETS.name}")


def count_statements(tree: ast.AST) -> int:
    """Count the statements of a syntax tree, docstrings left out; none is inside an expression."""
    inner = [
        node
        for name in ("body", "orelse", "finalbody", "handlers", "cases")
        for node in getattr(tree, name, ())
    ]
    return sum(map(count_statements, inner)) + sum(
        isinstance(node, ast.stmt)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in inner
    )


def source_files() -> Iterator[Path]:
    """Yield code and data of the packages and of their tests."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*")):
            if path.suffix in DATA or path.suffix == ".py":
                yield path


def sizes(rooms: tuple[Room, ...]) -> dict[str, Size]:
    """Add up the files of every room; data of any package is the last room's."""
    found = {room.name: Size() for room in rooms}
    for path in source_files():
        text = path.read_text()
        is_code = path.suffix == ".py"
        size = found[room_of(str(path.relative_to(ROOT)), rooms) if is_code else DATA_ROOM]
        lines = text.count("\n")
        size.statements += count_statements(ast.parse(text)) if is_code else lines
        size.lines += lines
        size.files += 1
    return found


def too_large(rooms: tuple[Room, ...], found: dict[str, Size]) -> list[str]:
    """Name the rooms beyond their budgets, and all of them together where that is beyond theirs."""
    budget = sum(room.statements for room in rooms)
    together = sum(size.statements for size in found.values())
    counted = [
        (room.name, found[room.name].statements, room.statements, room.most) for room in rooms
    ]
    counted.append(("all rooms together", together, budget, budget + SPARE_STATEMENTS))
    return [
        f"{name}: {statements} statements, a budget of {budget}"
        for name, statements, budget, most in counted
        if statements > most
    ]


def test_rooms_keep_to_their_budgets() -> None:
    rooms = read_rooms()
    assert not too_large(rooms, sizes(rooms))


def test_a_room_beyond_its_budget_is_named() -> None:
    small, large = Room("small", ("a/*",), 100), Room("large", ("*",), 10_000)
    assert room_of("a/b/c.py", (small, large)) == "small"
    assert not too_large((small, large), {"small": Size(140), "large": Size(10_000)})
    assert not too_large((small, large), {"small": Size(-100), "large": Size(10_200)})
    found = {"small": Size(141), "large": Size(10_201)}
    assert [line.partition(":")[0] for line in too_large((small, large), found)] == [
        "small",
        "large",
        "all rooms together",
    ]


def moved_lines(commit: str) -> int:
    """Count lines that left the packages since a commit and stand in tests or data now."""
    changes = subprocess.run(
        ["git", "diff", "--unified=0", "--no-renames", commit, "--", *PACKAGES],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    left: Counter[str] = Counter()
    come: Counter[str] = Counter()
    file = ""
    for line in changes.splitlines():
        if line.startswith(("--- ", "+++ ")):
            file = line[6:] if line[4:6] in {"a/", "b/"} else file
            continue
        is_product = file.endswith(".py") and not file.startswith("tests/")
        text = line[1:].strip()
        if len(text) < SHORTEST_LINE:
            continue
        if line[:1] == "-" and is_product:
            left[text] += 1
        elif line[:1] == "+" and not is_product:
            come[text] += 1
    return (left & come).total()


def main() -> None:
    """Print the sizes of all rooms."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--since", metavar="COMMIT")
    since = parser.parse_args().since
    rooms = read_rooms()
    found = sizes(rooms)
    sys.stdout.write(f"{'room':<24}{'budget':>8}{'is':>8}{'lines':>9}{'files':>7}\n")
    for room in rooms:
        size = found[room.name]
        sys.stdout.write(
            f"{room.name:<24}{room.statements:>8,}{size.statements:>8,}"
            f"{size.lines:>9,}{size.files:>7,}\n"
        )
    if since is not None:
        sys.stdout.write(f"lines moved into tests and data since {since}: {moved_lines(since):,}\n")


if __name__ == "__main__":
    main()
