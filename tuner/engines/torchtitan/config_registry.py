"""torchtitan's Python configurations (`config_registry.py` of a model) as sections of its TOML.

The function that `--config` names returns `Trainer.Config(training=TrainingConfig(...), ...)`, or
what another function of the file returns with some attributes set. The text is parsed and never
run: a call is the table of its keywords, a name of the file's top level its number or text, and
what is no literal is left out. Read from
github.com/pytorch/torchtitan of August 2026: config_registry.py, quantization/nvfp4.py.
"""

import ast
import copy
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Final

Keys = dict[str, Any]
_MODULE: Final = re.compile(r"[A-Za-z_]\w*(?:[./][A-Za-z_]\w*){0,4}")
_CALLED, _ARGUMENTS = "()", "*"
"""Keys of a call's name and positional arguments, beside its keywords."""
_UNREAD: Final = object()
MOST_TABLES: Final = 10_000
"""Tables and lists of all functions of a file, each as often as it is called."""
_GRAPHS: Final = "disable_cuda_graphs"
_CONVERTERS: Final = {"Float8Linear": "float8", "MXFP8Linear": "mx", "NVFP4Linear": "nvfp4"}
_MODES: Final = {"SelectiveAC": "selective", "FullAC": "full", "MemoryBudgetAC": "memory_budget"}


def registry_paths(module: str) -> Iterator[str]:
    """Yield where the repository may hold the file of a `--module`."""
    if _MODULE.fullmatch(module):
        for folder in ("models", "experiments"):
            yield f"torchtitan/{folder}/{module.replace('.', '/')}/config_registry.py"


def registered_sections(text: str, *, module: str, name: str) -> dict[str, Keys] | None:
    """Return what a function of such a file sets; None where it has no such function."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parsed = ast.parse(text)
        functions = {
            statement.name: statement
            for statement in parsed.body
            if isinstance(statement, ast.FunctionDef)
        }
        given = _Functions(functions, parsed.body).returned(name)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    is_configuration = given is not None and str(given.get(_CALLED)).endswith("Config")
    if given is None or not is_configuration:
        return None
    sections = _sections(given, module)
    # Graphs are the default since August 2026, when every model with another case got the switch.
    sections["training"].setdefault(_GRAPHS, _GRAPHS not in text)
    return sections


class _Functions:
    """The functions of a file, each evaluated once."""

    def __init__(self, functions: Mapping[str, ast.FunctionDef], top: list[ast.stmt]) -> None:
        self._functions = functions
        self._known: dict[str, Keys | None] = {}
        self._num_copied = 0
        self._constants: Keys = {}
        for targets, value in map(_assigned, top):
            if isinstance(value, ast.Constant | ast.Name | ast.BinOp):
                for target in targets:
                    _assign(self._constants, target, self._value(value, self._constants))

    def returned(self, name: str) -> Keys | None:
        """Return the table that a function returns; None where it returns none."""
        if name not in self._known:
            self._known[name] = None  # A function that calls itself returns none.
            body = self._functions[name].body if name in self._functions else []
            self._known[name] = self._evaluated(body)
        copied: dict[int, Any] = {}
        table = copy.deepcopy(self._known[name], copied)
        self._num_copied += len(copied)
        if self._num_copied > MOST_TABLES:
            raise ValueError("functions of functions hold more tables than any configuration")
        return table

    def _evaluated(self, body: list[ast.stmt]) -> Keys | None:
        names = dict(self._constants)
        for statement in body:
            if isinstance(statement, ast.Return) and statement.value is not None:
                table = self._value(statement.value, names)
                return table if isinstance(table, dict) else None
            targets, value = _assigned(statement)
            result = None if value is None else self._value(value, names)
            for target in targets:
                _assign(names, target, result)
        return None

    def _value(self, node: ast.expr, names: Keys) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return names.get(node.id, _UNREAD)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            left, right = self._value(node.left, names), self._value(node.right, names)
            is_small = all(type(side) is int and abs(side) < 10**12 for side in (left, right))
            return left * right if is_small else _UNREAD
        if isinstance(node, ast.List | ast.Tuple):
            return [self._value(entry, names) for entry in node.elts]
        return self._call(node, names) if isinstance(node, ast.Call) else _UNREAD

    def _call(self, node: ast.Call, names: Keys) -> Any:
        called = ast.unparse(node.func)
        if called in self._functions:
            return self.returned(called) or _UNREAD
        given = {
            keyword.arg: self._value(keyword.value, names)
            for keyword in node.keywords
            if keyword.arg
        }
        return given | {_CALLED: called, _ARGUMENTS: [self._value(n, names) for n in node.args]}


def _assigned(statement: ast.stmt) -> tuple[list[ast.expr], ast.expr | None]:
    """Return what a statement assigns to, `x = y = 3` or `x: int = 3`, and the value."""
    if isinstance(statement, ast.Assign):
        return statement.targets, statement.value
    if isinstance(statement, ast.AnnAssign) and statement.value is not None:
        return [statement.target], statement.value
    return [], None


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
    names = ("training", "parallelism", "compile", "checkpoint")
    sections = {name: _literals(given.get(name)) for name in names}
    policy = given.get("activation_checkpoint", {})
    kind = policy.get(_CALLED, "").partition(".")[0] if isinstance(policy, dict) else ""
    mode = "none" if policy is None else _MODES.get(kind, "selective")
    by_op = {"selective_ac_option": "op"} if mode == "selective" else {}
    sections["activation_checkpoint"] = {"mode": mode, **by_op, **_literals(policy)}
    spec = given.get("model_spec")
    sections["model"] = _model(spec, module) if isinstance(spec, dict) else {}
    recipe = sections["model"].pop("float8_recipe", None)
    if recipe is not None:
        sections["quantize"] = {"linear": {"float8": {"recipe_name": recipe}}}
    return sections


def _literals(table: Any) -> Keys:
    """Return the values of a call's table that a TOML could hold."""
    given, plain = table if isinstance(table, dict) else {}, (str, int, float, bool)
    return {
        key: value
        for key, value in given.items()
        if key not in (_CALLED, _ARGUMENTS)
        and all(
            isinstance(entry, plain) for entry in (value if isinstance(value, list) else [value])
        )
    }


def _model(spec: Keys, module: str) -> Keys:
    """Return flavor, dispatcher and converters of a `model_registry(...)`."""
    model: Keys = {"name": module, **_literals(spec)}
    if spec.get(_ARGUMENTS) and isinstance(spec[_ARGUMENTS][0], str):
        model["flavor"] = spec[_ARGUMENTS][0]
    listed = spec.get("converters")
    tables = (
        [table for table in listed if isinstance(table, dict)] if isinstance(listed, list) else []
    )
    model["converters"] = []
    for table in tables:
        called = str(table.get(_CALLED))
        kind = next(
            (converter for name, converter in _CONVERTERS.items() if called.startswith(name)), None
        )
        if kind is None:
            continue
        model["converters"].append(kind)
        if kind == "float8":
            model["float8_recipe"] = _literals(table).get("recipe_name", "rowwise")
        # `nvfp4_bf16_tail_fqns(layers, share)` leaves the last layers in bf16.
        rest = table.get("fqns")
        shares = rest.get(_ARGUMENTS, ()) if isinstance(rest, dict) else ()
        if kind == "nvfp4":
            model["bf16_tail_fraction"] = next(
                (share for share in shares if type(share) is float), 0.0
            )
    return model
