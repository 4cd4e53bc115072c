"""torchtitan's Python configurations (`config_registry.py` of a model) as sections of its TOML.

The function that `--config` names returns `Trainer.Config(training=TrainingConfig(...), ...)`, or
what another function of the file returns with some attributes set. The text is parsed and never
run: a call is taken as the table of its keywords, and what is no literal is left out.

Read from github.com/pytorch/torchtitan of August 2026: models/*/config_registry.py,
experiments/transformers_modeling_backend, components/quantization/nvfp4.py.
"""

import ast
import copy
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

Keys = dict[str, Any]
FOLDERS: Final = ("models", "experiments")
"""Of the repository, where modules lie."""
_MODULE: Final = re.compile(r"[A-Za-z_]\w*(?:[./][A-Za-z_]\w*){0,4}")
_CALLED: Final = "()"
"""Key of the name that a call has, beside its keywords."""
_ARGUMENTS: Final = "*"
_UNREAD: Final = object()
_LARGEST: Final = 10**12
_PRODUCTS: Final[Mapping[type[ast.operator], Callable[[int, int], int]]] = {
    ast.Mult: operator.mul,
    ast.FloorDiv: lambda one, two: one // two if two else 0,
}
_SECTIONS: Final = ("training", "parallelism", "compile", "checkpoint")
_CONVERTERS: Final = {
    "Float8Linear": "float8",
    "MXFP8Linear": "mx",
    "NVFP4Linear": "nvfp4",
}
_CHECKPOINTING: Final[Mapping[str, Keys]] = {
    "SelectiveAC": {"mode": "selective", "selective_ac_option": "op"},
    "FullAC": {"mode": "full"},
    "MemoryBudgetAC": {"mode": "memory_budget"},
}


def registry_paths(module: str) -> Iterator[str]:
    """Yield where the repository may hold the file of a `--module`."""
    if _MODULE.fullmatch(module):
        part = module.replace(".", "/")
        yield from (f"torchtitan/{folder}/{part}/config_registry.py" for folder in FOLDERS)


def registered_sections(text: str, *, module: str, name: str) -> dict[str, Keys] | None:
    """Return what a function of such a file sets; None where it has no such function."""
    try:
        parsed = ast.parse(text)
        functions = {one.name: one for one in parsed.body if isinstance(one, ast.FunctionDef)}
        given = _Functions(functions).returned(name)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return None if given is None else _sections(given, module)


class _Functions:
    """The functions of a file, each evaluated once."""

    def __init__(self, functions: Mapping[str, ast.FunctionDef]) -> None:
        self._functions = functions
        self._known: dict[str, Keys | None] = {}

    def returned(self, name: str) -> Keys | None:
        """Return the table that a function returns; None where it returns none."""
        if name not in self._known:
            self._known[name] = None  # A function that calls itself returns none.
            body = self._functions[name].body if name in self._functions else []
            self._known[name] = self._evaluated(body)
        return copy.deepcopy(self._known[name])

    def _evaluated(self, body: list[ast.stmt]) -> Keys | None:
        names: Keys = {}
        for statement in body:
            if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                _assign(names, statement.targets[0], self._value(statement.value, names))
            elif isinstance(statement, ast.Return) and statement.value is not None:
                value = self._value(statement.value, names)
                return value if isinstance(value, dict) else None
        return None

    def _value(self, node: ast.expr, names: Keys) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return names.get(node.id, _UNREAD)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self._value(node.operand, names)
            return -value if isinstance(value, int | float) else _UNREAD
        if isinstance(node, ast.BinOp):
            one, two = self._value(node.left, names), self._value(node.right, names)
            product = _PRODUCTS.get(type(node.op))
            is_small = all(type(side) is int and abs(side) < _LARGEST for side in (one, two))
            return product(one, two) if product and is_small else _UNREAD
        if isinstance(node, ast.List | ast.Tuple):
            return [self._value(one, names) for one in node.elts]
        return self._call(node, names) if isinstance(node, ast.Call) else _UNREAD

    def _call(self, node: ast.Call, names: Keys) -> Any:
        called = ast.unparse(node.func)
        if called in self._functions:
            return self.returned(called) or _UNREAD
        given = {one.arg: self._value(one.value, names) for one in node.keywords if one.arg}
        return given | {_CALLED: called, _ARGUMENTS: [self._value(n, names) for n in node.args]}


def _assign(names: Keys, target: ast.expr, value: Any) -> None:
    """Set a variable, or an attribute of the table that one holds."""
    path: list[str] = []
    while isinstance(target, ast.Attribute):
        path.insert(0, target.attr)
        target = target.value
    if not isinstance(target, ast.Name):
        return
    keys: Any = names
    for part in (target.id, *path)[:-1]:
        keys = keys.setdefault(part, {}) if isinstance(keys, dict) else None
    if isinstance(keys, dict):
        keys[(target.id, *path)[-1]] = value


def _sections(given: Keys, module: str) -> dict[str, Keys]:
    """Return the tables that a prediction reads, by the names of a TOML."""
    sections = {name: _literals(given.get(name)) for name in _SECTIONS}
    sections["training"] = {"disable_cuda_graphs": False} | sections["training"]
    policy = given.get("activation_checkpoint", {_CALLED: "SelectiveAC"})
    mode = policy.get(_CALLED, "").partition(".")[0] if isinstance(policy, dict) else ""
    chosen = {"mode": "none"} if policy is None else _CHECKPOINTING.get(mode, {"mode": "selective"})
    sections["activation_checkpoint"] = chosen | _literals(policy)
    spec = given.get("model_spec")
    sections["model"] = _model(spec, module) if isinstance(spec, dict) else {}
    if sections["model"].get("converters") == ["float8"]:
        sections["quantize"] = {"linear": {"float8": {"recipe_name": "rowwise"}}}
    return sections


def _literals(table: Any) -> Keys:
    """Return the values of a call's table that a TOML could hold."""
    own = table if isinstance(table, dict) else {}
    return {
        key: value
        for key, value in own.items()
        if key not in (_CALLED, _ARGUMENTS)
        and (isinstance(value, str | int | float | bool) or _is_names(value))
    }


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _model(spec: Keys, module: str) -> Keys:
    """Return flavor, dispatcher and converters of a `model_registry(...)`."""
    model: Keys = {"name": module, **_literals(spec)}
    if spec.get(_ARGUMENTS) and isinstance(spec[_ARGUMENTS][0], str):
        model["flavor"] = spec[_ARGUMENTS][0]
    converters = spec.get("converters")
    model["converters"] = []
    for one in converters if isinstance(converters, list) else ():
        called = one.get(_CALLED, "") if isinstance(one, dict) else ""
        model["converters"] += [
            kind for named, kind in _CONVERTERS.items() if called.startswith(named)
        ]
        if model["converters"] == ["nvfp4"]:
            # `nvfp4_bf16_tail_fqns(layers, share)` leaves the last layers in bf16.
            rest = one.get("fqns")
            tail = rest.get(_ARGUMENTS, []) if isinstance(rest, dict) else []
            model["bf16_tail_fraction"] = float(tail[1]) if len(tail) == 2 else 0.0
    return model
