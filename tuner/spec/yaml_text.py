"""YAML within bounds: plain in the project's own files, all that is safe in those of others.

In plain YAML anchors and aliases are refused (a few lines of them can stand for gigabytes), so are
duplicate keys (the earlier value would be lost silently), keys that are not text, tags and deep
nesting. Files of others, such as Kubernetes objects, use them: what their aliases expand to is
counted before it is built.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, Final

import yaml

from tuner.errors import SpecError
from tuner.spec.files import one_line, shown_value

_DEEPEST: Final = 32
_MOST_NODES: Final = 200_000
"""Most values of a document, once its aliases are expanded."""
_MOST_DIGITS: Final = 1000
"""Most digits of a number: Python prints none of more than 4,300 decimal digits."""
_ERRORS: Final = (
    *(yaml.YAMLError, ValueError, TypeError),
    *(ArithmeticError, AttributeError, LookupError),
)
"""Errors that the safe loader raises for texts such as `2024-13-45`, `0x_` and `!!bool "x"`."""
_TRUTH: Final = "tag:yaml.org,2002:bool"
_TEXT: Final = "tag:yaml.org,2002:str"


class _Refusal(yaml.MarkedYAMLError):
    """Something that YAML allows and a spec does not."""


class _BoundedLoader(yaml.SafeLoader):
    """The safe loader without numbers, and expansions, that nothing can hold or print."""

    def construct_yaml_int(self, node: Any) -> int:
        if len(node.value) > _MOST_DIGITS:
            raise _Refusal(
                problem=f"a number of {len(node.value)} characters is too long",
                problem_mark=node.start_mark,
            )
        return int(super().construct_yaml_int(node))

    def construct_document(self, node: Any) -> Any:
        if _expanded_nodes(node, {}) > _MOST_NODES:
            raise _Refusal(
                problem=f"its aliases expand to more than {_MOST_NODES} values",
                problem_mark=node.start_mark,
            )
        return super().construct_document(node)


_BoundedLoader.add_constructor("tag:yaml.org,2002:int", _BoundedLoader.construct_yaml_int)


def _expanded_nodes(node: Any, known: dict[int, float]) -> float:
    """Count the nodes below one, those of an alias every time; endless where one holds itself."""
    if isinstance(node, yaml.ScalarNode):
        return 1.0
    if id(node) not in known:
        known[id(node)] = math.inf
        parts = node.value if isinstance(node, yaml.SequenceNode) else chain(*node.value)
        known[id(node)] = 1.0 + sum(_expanded_nodes(part, known) for part in parts)
    return known[id(node)]


class _PlainLoader(_BoundedLoader):
    _depth = 0
    _keys: tuple[type, ...] = (str,)

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]  # stubs leave it out
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise _Refusal(
                problem="anchors and aliases are not allowed; write the value out",
                problem_mark=event.start_mark,
            )
        if getattr(event, "tag", None) is not None:
            raise _Refusal(
                problem=f"the tag {event.tag!r} is not allowed; write a plain value",
                problem_mark=event.start_mark,
            )
        if self._depth >= _DEEPEST:
            raise _Refusal(problem="nested too deeply", problem_mark=event.start_mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            # YAML 1.1 reads the bare words on, off, yes and no as booleans; keys are text.
            if key_node.tag == _TRUTH:
                key_node.tag = _TEXT
            key = self.construct_object(key_node, deep=True)
            if type(key) not in self._keys:
                raise _Refusal(
                    problem=f"the key {shown_value(key)} is not text; quote it",
                    problem_mark=key_node.start_mark,
                )
            if key in seen:
                raise _Refusal(
                    problem=f"the key {shown_value(key)} appears twice; keep one",
                    problem_mark=key_node.start_mark,
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


class _NumberedLoader(_PlainLoader):
    _keys = (str, int)


def parse_yaml(text: str, *, source: str, has_numbered_keys: bool = False) -> Any:
    """Parse one document; keys are text, and whole numbers where `has_numbered_keys`.

    Raises:
        SpecError: not YAML, or more than plain YAML; the message names the line.
    """
    loader = _NumberedLoader if has_numbered_keys else _PlainLoader
    with _one_line_errors(source):
        return yaml.load(text, Loader=loader)  # a SafeLoader that accepts less


def parse_documents(text: str, *, source: str) -> list[Any]:
    """Parse the documents of a file that others wrote.

    Raises:
        SpecError: not YAML, tags of objects, or more values than any such file has.
    """
    with _one_line_errors(source):
        return list(yaml.load_all(text, Loader=_BoundedLoader))  # the same


@contextmanager
def _one_line_errors(source: str) -> Iterator[None]:
    try:
        yield
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}: " if mark is not None else ""
        problem = error.problem or error.context or "not valid YAML"
        raise SpecError(one_line(f"{source}: {where}{problem}")) from error
    except RecursionError as error:
        raise SpecError(f"{source}: nested too deeply") from error
    except _ERRORS as error:
        raise SpecError(one_line(f"{source}: not valid YAML: {error}")) from error
