"""Megatron-LM's lists of layers: `--moe-layer-freq` and `--linear-attention-freq`.

The engine evaluates them as Python; here they are read as what they are documented to be: a sum of
lists of 0 and 1, each possibly repeated, e.g. `([0]*3+[1]*58)`, or a number n. Layer i has experts
where i % n is 0, and linear attention where (i + 1) % n is not 0.
"""

import re
from typing import Final

from tuner.errors import SpecError
from tuner.spec.files import shown_value
from tuner.spec.model import MOST_LAYERS

_RUN: Final = re.compile(r"\(?\[([01](?:,[01])*)\]\)?(?:\*(\d{1,5}))?")


def linear_pattern(text: str, *, num_layers: int, said: str) -> tuple[int, ...]:
    """Return 1 for every layer with linear attention and 0 for the others.

    Raises:
        SpecError: neither a number nor such a list, or not one entry a layer.
    """
    step = int(text) if re.fullmatch(r"\d{1,5}", text) else 0
    if step:
        return tuple(int((layer + 1) % step != 0) for layer in range(num_layers))
    return layer_pattern(text, num_layers=num_layers, said=said)


def layer_pattern(text: str, *, num_layers: int, said: str) -> tuple[int, ...]:
    """Return 1 for every layer with experts and 0 for the others.

    Raises:
        SpecError: neither a number nor such a list, or not one entry a layer.
    """
    plain = re.sub(r"\s", "", text)
    if re.fullmatch(r"\d{1,5}", plain) and int(plain):
        return tuple(int(layer % int(plain) == 0) for layer in range(num_layers))
    while plain.startswith("(") and plain.endswith(")") and _is_whole(plain):
        plain = plain[1:-1]
    pattern: list[int] = []
    for part in plain.split("+"):
        match = _RUN.fullmatch(part)
        if match is None:
            raise SpecError(
                f"{said} {shown_value(text)} is no pattern of layers; write a number, or lists of "
                "0 and 1 such as ([0]*3+[1]*58)"
            )
        pattern += [int(kind) for kind in match.group(1).split(",")] * int(match.group(2) or 1)
        if len(pattern) > MOST_LAYERS:
            raise SpecError(f"{said} {shown_value(text)}: more than {MOST_LAYERS} layers")
    if len(pattern) != num_layers:
        raise SpecError(
            f"{said} {shown_value(text)} names {len(pattern)} layers, --num-layers {num_layers}"
        )
    return tuple(pattern)


def _is_whole(text: str) -> bool:
    """Say whether the first parenthesis closes at the very end."""
    depth = 0
    for index, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return index == len(text) - 1
    return False
