"""Plain YAML: mappings, lists and scalars only.

Anchors and aliases are refused (a few lines of them can stand for gigabytes), so are duplicate keys
(the earlier value would be lost silently), keys that are not text, tags and deep nesting.
"""

from typing import Any, Final

import yaml

from tuner.errors import SpecError
from tuner.spec.files import one_line, shown_value

_DEEPEST: Final = 32
_TRUTH: Final = "tag:yaml.org,2002:bool"
_TEXT: Final = "tag:yaml.org,2002:str"


class _Refusal(yaml.MarkedYAMLError):
    """Something that YAML allows and a spec does not."""


class _PlainLoader(yaml.SafeLoader):
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
    try:
        # The loader is a SafeLoader that accepts less.
        return yaml.load(text, Loader=_NumberedLoader if has_numbered_keys else _PlainLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}: " if mark is not None else ""
        problem = error.problem or error.context or "not valid YAML"
        raise SpecError(one_line(f"{source}: {where}{problem}")) from error
    except (yaml.YAMLError, ValueError) as error:
        # Invalid dates and numbers raise a bare ValueError.
        raise SpecError(one_line(f"{source}: not valid YAML: {error}")) from error
    except RecursionError as error:
        raise SpecError(f"{source}: nested too deeply") from error
