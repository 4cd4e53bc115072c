"""Counts how often one idea is written, and how long the way from a plan to a price is.

    python tests/benchmarks/code_structure.py [--list MEASURE] [--static]

    configuration types   classes with fields for at least four of: tensor, pipeline, context, data
                          and expert parallelism, micro-batch
    goal branches         files that ask for the kind of a goal: isinstance or a case of a type of
                          one goal, a comparison with a goal's name, a table by their names
    knobs in engines      files of `tuner/engines/` and `tuner/catalog/` that name one knob, the
                          median (`Knob.field` of training, fields of serving's `Instances`)
    knobs elsewhere       the same for all other files; of training's alone, by identifiers and
                          strings as all the others, and by identifiers alone
    files of a mode       files that name a mode of serving, by an identifier, an import, a string
                          or their own name: the median over the modes, and the most
    path to a price       product functions on the longest stack from `tuner.api.plan` to the price
                          of one kernel, over a plan of every goal that has kernels
    files of a plan       product files of which a function runs during those plans
    repeated class names  names that two or more classes have
    statements            of the three packages, docstrings not counted
    arrows                pairs of folders of `tuner/` of which one imports the other by `from`; the
                          folders of single engines count as one

All but the two that plan something are read from the source without importing it.
"""

import ast
import inspect
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any, Final

from tests.benchmarks.bars import parse, say
from tests.test_line_budget import count_statements

CHECKOUT: Final = Path(__file__).parents[2]
PACKAGES: Final = ("tuner", "solvers", "profilers")
GOALS: Final = ("train", "serve", "place")
NO_KNOBS: Final = frozenset({"role", "pool", "island", "count", "devices"})
"""Fields of serving instances that say which and how many, not how they run."""
DEGREES: Final[Mapping[str, str]] = {
    "tensor": r"tensor|tensor_model_parallel_size|tp",
    "pipeline": r"pipeline|pipeline_model_parallel_size|pp",
    "context": r"context|context_parallel_size|cp",
    "data": r"data|data_parallel_size|dp",
    "expert": r"expert|expert_model_parallel_size|ep",
    "micro-batch": r"micro_batch(_size)?|mbs",
}
LEAST_DEGREES: Final = 4
OF_ONE_GOAL: Final = re.compile(
    r"(Train|Serve|Place)\w*|\w+(Train|Serve|Place)\w*|Plan|VerifiedPlan|VerifiedPlacement|Spec"
)
PRICERS: Final = re.compile(r"prices/([a-z_]*|serve/tables)\.py$")
SPECS: Final = (
    "examples/checks/train-mixtral/spec.yaml",
    "examples/checks/train-measured/spec.yaml",
    "examples/checks/serve-disaggregated/spec.yaml",
)


def main() -> int:
    """Print the counts."""
    options = parse(__doc__, {"--list": "", "--static": False})
    found = static_measures(sources())
    if not options.static:
        found |= planned_measures()
    for name, items in found.items():
        say(f"{name:<22}{len(items) if isinstance(items, list) else items:>8,}")
        if name == options.list and isinstance(items, list):
            say(*(f"    {item}" for item in items))
    return 0


Measures = dict[str, list[str] | int]


def sources() -> dict[str, ast.Module]:
    """Parse every file of the packages, by its path from the checkout."""
    return {
        str(path.relative_to(CHECKOUT)): ast.parse(path.read_bytes())
        for package in PACKAGES
        for path in sorted((CHECKOUT / package).rglob("*.py"))
    }


def static_measures(trees: Mapping[str, ast.Module]) -> Measures:
    """Count what the source alone shows."""
    classes = [
        (f"{file}:{node.name}", node)
        for file, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]
    names = Counter(node.name for _, node in classes)
    return {
        "configuration types": [where for where, node in classes if _is_configuration(node)],
        "goal branches": [file for file, tree in trees.items() if _branches_on_goal(tree)],
        **_knob_files(trees),
        **_mode_files(trees),
        "repeated class names": sorted(name for name, count in names.items() if count > 1),
        "statements": sum(map(count_statements, trees.values())),
        "arrows": sorted(_arrows(trees)),
        "rooms": sorted({_room(file) for file in trees if file.startswith("tuner/")}),
        "files": len(trees),
    }


def _is_configuration(node: ast.ClassDef) -> bool:
    fields = {
        one.target.id
        for one in node.body
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    }
    known = sum(
        any(re.fullmatch(pattern, field) for field in fields) for pattern in DEGREES.values()
    )
    return known >= LEAST_DEGREES


def _branches_on_goal(tree: ast.Module) -> bool:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "isinstance"
            and any(
                isinstance(name, ast.Name) and OF_ONE_GOAL.fullmatch(name.id)
                for name in ast.walk(node.args[1])
            )
        ):
            return True
        if isinstance(node, ast.Compare) and any(
            isinstance(part, ast.Constant) and part.value in GOALS
            for side in (node.left, *node.comparators)
            for part in ast.walk(side)
        ):
            return True
        if isinstance(node, ast.Dict) and sum(_is_goal_name(key) for key in node.keys) > 1:
            return True
        if isinstance(node, ast.MatchValue) and _is_goal_name(node.value):
            return True
        if isinstance(node, ast.MatchClass) and OF_ONE_GOAL.fullmatch(ast.unparse(node.cls)):
            return True
    return False


def _is_goal_name(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value in GOALS


def _knob_files(trees: Mapping[str, ast.Module]) -> Measures:
    """Count the files that name a knob, inside and outside `engines/`: the median of each."""
    named = {file: _identifiers(tree) for file, tree in trees.items()}
    inside = {file for file in named if file.startswith(("tuner/engines/", "tuner/catalog/"))}
    outside = named.keys() - inside
    training, serving = _knobs(trees)
    inner, outer = (
        {
            knob: sum(knob in named[file] for file in files)
            for knob in dict.fromkeys((*training, *serving))
        }
        for files in (inside, outside)
    )
    words = {file: _identifiers(trees[file], with_constants=False) for file in outside}
    by_identifier = [sum(knob in words[file] for file in outside) for knob in training]
    return {
        "knobs": len(outer),
        "knobs in engines": round(median(inner.values())),
        "knobs elsewhere": round(median(outer.values())),
        "training knobs elsewhere": round(median(outer[knob] for knob in training)),
        "by identifiers": round(median(by_identifier)),
        "most by identifiers": max(by_identifier),
    }


def _knobs(trees: Mapping[str, ast.Module]) -> tuple[list[str], list[str]]:
    """Name the knobs of training and of serving."""
    training = [
        str(keyword.value.value)
        for node in ast.walk(trees["tuner/config/knobs.py"])
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Knob"
        for keyword in node.keywords
        if keyword.arg == "field" and isinstance(keyword.value, ast.Constant)
    ]
    serving = [
        one.target.id
        for node in trees["tuner/config/serve.py"].body
        if isinstance(node, ast.ClassDef) and node.name == "Instances"
        for one in node.body
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    ]
    return training, [field for field in serving if field not in NO_KNOBS]


def _mode_files(trees: Mapping[str, ast.Module]) -> Measures:
    """Count the files that name a mode of serving: the median and the most."""
    named = {
        file: {
            word
            for name in {Path(file).stem, *filter(_is_name, _identifiers(tree) | _imports(tree))}
            for word in (name, *name.split("."))
        }
        for file, tree in trees.items()
    }
    files = {
        mode: [file for file, words in named.items() if any(_holds(word, mode) for word in words)]
        for mode in _modes(trees)
    }
    counts = [len(names) for names in files.values()]
    return {
        "files of a mode": round(median(counts)),
        "most files of a mode": max(counts),
        **{f"files of {mode}": names for mode, names in files.items()},
    }


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value.replace(".", "_").isidentifier()


def _holds(word: str, mode: str) -> bool:
    """Return whether an identifier has the name of a mode as a whole part."""
    return f"_{mode}_" in f"_{word}_"


def _imports(tree: ast.Module) -> set[str]:
    """Return the modules and names that a file imports."""
    return {
        name
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in (getattr(node, "module", None) or "", *(alias.name for alias in node.names))
    }


def _modes(trees: Mapping[str, ast.Module]) -> list[str]:
    """Return the modes that a spec may name."""
    return [
        str(constant.value)
        for node in trees["tuner/spec/serving/goal.py"].body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "Mode"
        for constant in ast.walk(node.value)
        if isinstance(constant, ast.Constant)
    ]


def _identifiers(tree: ast.Module, *, with_constants: bool = True) -> set[Any]:
    """Return the names, attributes and arguments of a file, and its constants."""
    return {
        value
        for node in ast.walk(tree)
        for value in (
            getattr(node, "attr", None),
            getattr(node, "id", None),
            getattr(node, "arg", None),
            node.value if with_constants and isinstance(node, ast.Constant) else None,
        )
    }


def _room(file: str) -> str:
    """Return the folder of a file; those of single engines are one room."""
    folder = Path(file).parent
    names = {path.name for path in (CHECKOUT / folder).glob("*.py")} - {"__init__.py"}
    is_engine = "capabilities.py" in names or names == {"placement.py"}
    is_engine &= folder.parent == Path("tuner/engines")
    return "tuner/engines/*" if is_engine else str(folder)


def _arrows(trees: Mapping[str, ast.Module]) -> set[str]:
    arrows = set()
    for file, tree in trees.items():
        if not file.startswith("tuner/"):
            continue
        for target in _imported(tree):
            path = target.replace(".", "/")
            room = _room(f"{path}.py") if f"{path}.py" in trees else path
            if room != _room(file) and (room == "tuner" or room.startswith("tuner/")):
                arrows.add(f"{_room(file)} -> {room}")
    return arrows


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yield the modules that a file imports from its own package, `if TYPE_CHECKING` included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tuner"):
            yield node.module or ""


def planned_measures() -> Measures:
    """Plan a spec of every goal that has kernels, and watch which functions run."""
    watch = CallWatch()
    for spec in SPECS:
        watch.during(partial(_plan, CHECKOUT / spec))
    return {
        "path to a price": watch.longest,
        "files of a plan": sorted(watch.files),
    }


def _plan(spec: Path) -> None:
    from tuner import api

    with tempfile.TemporaryDirectory() as folder:
        api.write(Path(folder) / "plan", api.plan(spec, time_limit_s=30.0))


class CallWatch:
    """Records product files whose functions run, and the longest stack down to a pricer."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.longest: list[str] = []

    def during(self, call: Callable[[], Any]) -> None:
        """Watch one call, in this thread."""
        sys.setprofile(self._event)
        try:
            call()
        finally:
            sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event != "call" or (file := _product_file(frame)) is None:
            return
        self.files.add(file)
        if PRICERS.search(file):
            stack = list(_product_stack(frame))
            if len(stack) > len(self.longest):
                self.longest = stack


def _product_file(frame: FrameType) -> str | None:
    name = frame.f_code.co_filename
    # The bodies of classes and modules run where they are imported; only functions are optimised.
    is_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED
    if not is_function or not name.startswith(str(CHECKOUT)) or frame.f_code.co_name[0] == "<":
        return None
    file = name[len(str(CHECKOUT)) + 1 :]
    return file if file.partition("/")[0] in PACKAGES else None


def _product_stack(frame: FrameType) -> Iterable[str]:
    """Return the product functions on the stack, the outermost first, comprehensions left out."""
    found: list[str] = []
    at: FrameType | None = frame
    while at is not None:
        if (file := _product_file(at)) is not None:
            found.append(f"{file}:{at.f_code.co_name}")
        at = at.f_back
    return reversed(found)


if __name__ == "__main__":
    sys.path.insert(0, str(CHECKOUT))
    sys.exit(main())
