"""Mutation testing: small faults in the product, each against the tests that run its line.

    python tests/benchmarks/mutants.py draw MUTANTS.json [--count 300] [--seed 26]
    python tests/benchmarks/mutants.py cover MUTANTS.json COVERED.json [--processes 2]
    python tests/benchmarks/mutants.py run COVERED.json RESULTS.json [--survivors OTHER.json]
    python tests/benchmarks/mutants.py compare BEFORE.json AFTER.json

`draw` picks places inside functions of the three packages: a comparison, an arithmetic or Boolean
operator, `not`, a number, True or False, min or max; each is replaced by its counterpart. `cover`
runs the default tests once in an instrumented copy of the checkout, which records the tests that
reach each place, in child processes too. `run` inserts one mutant at a time into a copy and runs
the tests that reach it, nearest files and shortest tests first, until one fails or the budget in
seconds is used up. A mutant that keeps every test from starting, or that never ends, counts as
killed. To compare the tests of two commits, `cover` the same mutants in both, `run` the later one,
then the earlier one with the survivors of the later; `compare` lists those that only the earlier
tests killed.

The machine should be idle: a test that times out kills every mutant.
"""

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any, Final, NamedTuple

CHECKOUT: Final = Path(__file__).parents[2]
PACKAGES: Final = ("tuner", "solvers", "profilers")
COMPARED: Final = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.Is: ("is", "is not"),
}
CALCULATED: Final = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
}
HIT_MODULE: Final = """
import os
_seen = set()
def hit(number):
    test = os.environ.get("PYTEST_CURRENT_TEST")
    folder = os.environ.get("MOETUNE_MUTANT_HITS")
    if test and folder and (test, number) not in _seen:
        _seen.add((test, number))
        with open(os.path.join(folder, str(os.getpid())), "a") as file:
            file.write(f"{number}\\t{test}\\n")
"""


class Mutant(NamedTuple):
    """One replacement of text."""

    file: str
    line: int
    """From 1, when it was drawn."""
    column: int
    """Where the exchanged text begins, in bytes of the line."""
    before: str
    after: str
    text: str
    """The line, to locate it where the file has changed."""


def main() -> int:
    """Do what the command line asks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    actions = parser.add_subparsers(dest="action", required=True)
    for action, files in (
        ("draw", ("mutants",)),
        ("cover", ("mutants", "covered")),
        ("run", ("covered", "results")),
        ("compare", ("before", "after")),
    ):
        one = actions.add_parser(action)
        for file in files:
            one.add_argument(file, type=Path)
        one.add_argument("--count", type=int, default=300)
        one.add_argument("--seed", type=int, default=26)
        one.add_argument("--processes", type=int, default=2)
        one.add_argument("--budget", type=float, default=60.0)
        one.add_argument("--survivors", type=Path)
    options = parser.parse_args()
    match options.action:
        case "draw":
            _write(options.mutants, [m._asdict() for m in drawn(options.count, options.seed)])
        case "cover":
            mutants = [Mutant(**row) for row in json.loads(options.mutants.read_text())]
            _write(options.covered, covered(mutants, processes=options.processes))
        case "run":
            result = json.loads(options.covered.read_text())
            if options.survivors is not None:
                others = json.loads(options.survivors.read_text())["mutants"]
                alive = {_key(row) for row in others if row["outcome"] != "killed"}
                result["mutants"] = [row for row in result["mutants"] if _key(row) in alive]
            _write(options.results, results(result, options.processes, options.budget))
        case "compare":
            return compare_results(
                json.loads(options.before.read_text()), json.loads(options.after.read_text())
            )
    return 0


def drawn(count: int, seed: int) -> list[Mutant]:
    """Draw mutants, each as likely as any other."""
    every = [
        mutant
        for package in PACKAGES
        for file in sorted((CHECKOUT / package).rglob("*.py"))
        for mutant in mutants_of(file)
    ]
    chosen = random.Random(seed).sample(every, count)
    sys.stdout.write(f"{len(every):,} places, {count} drawn\n")
    return sorted(chosen)


class Source:
    """A file with byte offsets of its nodes."""

    def __init__(self, path: Path) -> None:
        self.name = str(path.relative_to(CHECKOUT))
        self.content = path.read_bytes()
        self.starts = [0]
        for line in self.content.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def begin(self, node: ast.expr) -> int:
        """Return where a node begins."""
        return self.starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr) -> int:
        """Return where a node ends."""
        return self.starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)

    def mutant(self, start: int, before: str, after: str) -> Mutant:
        """Replace the text that begins there."""
        line = self.content.count(b"\n", 0, start) + 1
        text = self.content[self.starts[line - 1] : self.starts[line]].decode().rstrip("\n")
        return Mutant(self.name, line, start - self.starts[line - 1], before, after, text)

    def operator(
        self, left: ast.expr, right: ast.expr, replacement: tuple[str, str] | None
    ) -> Iterator[Mutant]:
        """Replace the operator between two operands."""
        if replacement is None:
            return
        begin = self.end(left)
        place = self.content[begin : self.begin(right)].find(replacement[0].encode())
        if place >= 0:
            yield self.mutant(begin + place, *replacement)


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yield every replacement inside the functions of a file."""
    source = Source(path)
    for node in _inside_functions(ast.parse(source.content)):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            replacement = COMPARED.get(type(node.ops[0]))
            yield from source.operator(node.left, node.comparators[0], replacement)
        elif isinstance(node, ast.BinOp) and not _is_text(node.left):
            yield from source.operator(node.left, node.right, CALCULATED.get(type(node.op)))
        elif isinstance(node, ast.BoolOp) and len(node.values) == 2:
            words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            yield from source.operator(node.values[0], node.values[1], words)
        else:
            yield from _of_one_operand(node, source)


def _of_one_operand(node: ast.AST, source: Source) -> Iterator[Mutant]:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield source.mutant(source.begin(node), "not ", "")
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
        old = source.content[source.begin(node) : source.end(node)].decode()
        new = str(not node.value) if type(node.value) is bool else f"({old} + 1)"
        yield source.mutant(source.begin(node), old, new)
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and (other := {"min": "max", "max": "min"}.get(node.func.id))
    ):
        yield source.mutant(source.begin(node.func), node.func.id, other)


def _is_text(node: ast.expr) -> bool:
    """Whether a first operand is text, which neither minus nor division takes."""
    if isinstance(node, ast.JoinedStr):
        return True
    return isinstance(node, ast.Constant) and not isinstance(node.value, (int, float))


def _inside_functions(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the nodes of function bodies, without annotations, defaults and f-strings."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef)):
            for child in node.body:
                if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    yield from _walked(child)


def _walked(node: ast.AST) -> Iterator[ast.AST]:
    children: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        children = node.body
    elif isinstance(node, ast.AnnAssign):
        children = [node.value] if node.value is not None else []
    elif isinstance(node, ast.JoinedStr):
        return
    else:
        yield node
    for child in children:
        yield from _walked(child)


def covered(mutants: Sequence[Mutant], *, processes: int) -> dict[str, Any]:
    """Run the default tests once on the instrumented copy."""
    with tempfile.TemporaryDirectory(prefix="moetune-mutants-") as scratch:
        copy, hits = _copy(Path(scratch) / "main"), Path(scratch) / "hits"
        hits.mkdir()
        (copy / "moetune_mutant_hits.py").write_text(HIT_MODULE)
        by_file = defaultdict(list)
        for number, mutant in enumerate(mutants):
            by_file[mutant.file].append((number, mutant))
        for file, of in by_file.items():
            if (copy / file).exists():
                _instrument(copy / file, of)
        report = Path(scratch) / "report.xml"
        _pytest(
            copy,
            [
                *("-m", "not slow and not gpu", "-n", str(processes), "--dist", "loadfile"),
                *("--junitxml", str(report), "-o", "junit_family=xunit1"),
            ],
            {"MOETUNE_MUTANT_HITS": str(hits)},
        )
        seconds, failed = _read_report(report)
        reached: dict[int, set[str]] = defaultdict(set)
        whole_files: dict[int, set[str]] = defaultdict(set)
        for hit_file in hits.iterdir():
            for line in hit_file.read_text().splitlines():
                place, _, test = line.partition("\t")
                name, _, phase = test.rpartition(" ")
                reached[int(place)].add(name)
                if phase != "(call)":
                    whole_files[int(place)].add(name.partition("::")[0])
    rows = []
    for number, mutant in enumerate(mutants):
        tests = {
            name
            for name in seconds
            if name in reached[number] or name.partition("::")[0] in whole_files[number]
        } - failed
        order = sorted(tests, key=lambda name: (_distance(mutant.file, name), seconds[name], name))
        rows.append({**mutant._asdict(), "tests": [[name, seconds[name]] for name in order]})
    sys.stdout.write(
        f"{len(seconds):,} tests in {sum(seconds.values()):.0f} s, {len(failed)} failed and left"
        f" out; {sum(not row['tests'] for row in rows)} of {len(rows)} places are not reached\n"
    )
    return {"failed": sorted(failed), "mutants": rows}


def _instrument(path: Path, of: Sequence[tuple[int, Mutant]]) -> None:
    """Insert a call before every statement with a place."""
    tree = ast.parse(path.read_bytes())
    lines = defaultdict(list)
    source = path.read_bytes().splitlines()
    for number, mutant in of:
        if (line := _line(source, mutant)) is not None:
            lines[line].append(number)

    class ReachRecorder(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> Any:
            for name in ("body", "orelse", "finalbody"):
                block = getattr(node, name, None)
                if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                    setattr(node, name, [new for one in block for new in self.with_calls(one)])
            for child in ast.iter_child_nodes(node):
                if not isinstance(child, ast.expr):
                    self.visit(child)
            return node

        def with_calls(self, statement: ast.stmt) -> list[ast.stmt]:
            inner = [
                one
                for name in ("body", "orelse", "finalbody", "handlers", "cases")
                for one in getattr(statement, name, None) or []
            ]
            first = statement.lineno
            last = min((one.lineno for one in inner if hasattr(one, "lineno")), default=None)
            end = statement.end_lineno if last is None else max(first, last - 1)
            numbers = [n for line in range(first, (end or first) + 1) for n in lines.get(line, ())]
            is_definition = isinstance(
                statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
            )
            calls = [] if is_definition else [_call(number) for number in numbers]
            return [*calls, statement]

    module = ReachRecorder().visit(tree)
    place = _end_of_head(module)
    module.body[place:place] = ast.parse("import moetune_mutant_hits").body
    path.write_text(ast.unparse(ast.fix_missing_locations(module)))


def _end_of_head(module: ast.Module) -> int:
    """Return the index of the first import, after the docstring and `__future__` imports."""
    place = 0
    for index, node in enumerate(module.body):
        is_future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
        if is_future or (index == 0 and isinstance(node, ast.Expr)):
            place = index + 1
    return place


def _line(source: Sequence[bytes], mutant: Mutant) -> int | None:
    """Find the unchanged line, the nearest of several; from 1."""
    wanted = mutant.text.encode()
    same = [number for number, line in enumerate(source, start=1) if line == wanted]
    return min(same, key=lambda number: abs(number - mutant.line), default=None)


def _call(number: int) -> ast.stmt:
    return ast.parse(f"moetune_mutant_hits.hit({number})").body[0]


def _read_report(report: Path) -> tuple[dict[str, float], set[str]]:
    """Read the seconds of every test that passed or failed, and the names of those that failed."""
    seconds, failed = {}, set()
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('file')}::"
        inner = (case.get("classname") or "").split(".")
        stem = Path(case.get("file") or "").stem
        inside = inner[inner.index(stem) + 1 :] if stem in inner else []
        name += "::".join([*inside, case.get("name") or ""])
        if case.find("skipped") is not None:
            continue
        seconds[name] = float(case.get("time") or 0.0)
        if case.find("failure") is not None or case.find("error") is not None:
            failed.add(name)
    return seconds, failed


def _distance(file: str, test: str) -> tuple[int, int]:
    """Return the distance of a test file from a product file: its own tests, its folder, any
    other."""
    product, tested = Path(file), Path(test.partition("::")[0])
    same = tested.stem == f"test_{product.stem}" and tested.parent == "tests" / product.parent
    shared = 0
    for one, other in zip(product.parts, tested.parts[1:], strict=False):
        if one != other:
            break
        shared += 1
    return (0 if same else 1, -shared)


def results(result: Mapping[str, Any], processes: int, budget_s: float) -> dict[str, Any]:
    """Put each mutant into a copy and start its tests."""
    rows = result["mutants"]
    with tempfile.TemporaryDirectory(prefix="moetune-mutants-") as scratch:
        copies: Queue[Path] = Queue()
        for number in range(processes):
            copies.put(_copy(Path(scratch) / f"copy-{number}" / "main"))

        def run_mutant(row: dict[str, Any]) -> dict[str, Any]:
            copy = copies.get()
            try:
                outcome = _outcome(copy, row, budget_s)
            finally:
                copies.put(copy)
            sys.stdout.write(f"{row['file']}:{row['line']} {outcome}\n")
            sys.stdout.flush()
            return {**{name: row[name] for name in Mutant._fields}, "outcome": outcome}

        with ThreadPoolExecutor(processes) as pool:
            judgements = list(pool.map(run_mutant, rows))
    for outcome, count in Counter(each["outcome"] for each in judgements).most_common():
        sys.stdout.write(f"{outcome}: {count}\n")
    return {"mutants": judgements}


def _outcome(copy: Path, row: Mapping[str, Any], budget_s: float) -> str:
    chosen: list[str] = []
    spent_s = 0.0
    for name, seconds in row["tests"]:
        if chosen and spent_s + seconds > budget_s:
            break
        chosen.append(name)
        spent_s += seconds
    if not chosen:
        return "not reached"
    path, mutant = copy / row["file"], Mutant(**{name: row[name] for name in Mutant._fields})
    source = path.read_bytes()
    lines = source.splitlines(keepends=True)
    place = _line(source.splitlines(), mutant)
    if place is None:
        return "not found"
    line, end = lines[place - 1], mutant.column + len(mutant.before.encode())
    lines[place - 1] = line[: mutant.column] + mutant.after.encode() + line[end:]
    path.write_bytes(b"".join(lines))
    try:
        names = copy / "mutant-tests.txt"
        names.write_text("\n".join(chosen) + "\n")
        code = _pytest(copy, ["-x", f"@{names}"], {}, limit_s=60.0 + 4.0 * budget_s)
    finally:
        path.write_bytes(source)
    # Other codes: a test failed, none could be collected, or it did not end.
    return {0: "survived", 4: "tests not found", 5: "tests not found"}.get(code, "killed")


def _copy(folder: Path) -> Path:
    """Copy the files that git tracks, and link the data next to the checkout."""
    folder.mkdir(parents=True)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=CHECKOUT,
        capture_output=True,
        check=True,
    ).stdout.split(b"\0")
    for name in filter(None, map(os.fsdecode, listed)):
        if (CHECKOUT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(CHECKOUT / name, folder / name)
    beside = CHECKOUT.parent / "shared"
    if beside.exists() and not (folder.parent / "shared").exists():
        (folder.parent / "shared").symlink_to(beside.resolve())
    return folder


def _pytest(
    copy: Path, arguments: list[str], more: Mapping[str, str], *, limit_s: float | None = None
) -> int:
    """Run tests of a copy; -1 where they do not end in time."""
    environment = {
        **os.environ,
        **more,
        "PYTHONPATH": str(copy),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    process = subprocess.Popen(
        command,
        cwd=copy,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()
        return -1


def compare_results(before: Mapping[str, Any], after: Mapping[str, Any]) -> int:
    """List the mutants that only the first tests killed."""
    outcomes = [{_key(row): row["outcome"] for row in of["mutants"]} for of in (before, after)]
    lost = [key for key, out in outcomes[0].items() if out == "killed" != outcomes[1].get(key)]
    won = [key for key, out in outcomes[1].items() if out == "killed" != outcomes[0].get(key)]
    for one in outcomes:
        sys.stdout.write(f"{dict(Counter(one.values()))}\n")
    for key in lost:
        sys.stdout.write(f"lost: {key} is {outcomes[1].get(key)}\n")
    sys.stdout.write(f"{len(lost)} lost, {len(won)} won\n")
    return 0


def _key(row: Mapping[str, Any]) -> str:
    place = f"{row['file']}:{row['line']}:{row['column']}"
    return f"{place}: {row['text'].strip()}: {row['before']} -> {row['after']}"


def _write(file: Path, content: object) -> None:
    file.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
