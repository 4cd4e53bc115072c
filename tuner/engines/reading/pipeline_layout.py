"""Megatron-LM's `--pipeline-model-parallel-layout`: text such as `Et*3|(tt|)*29,m|L`.

`E` is the embedding, `t` a transformer layer, `m` a multi-token-prediction layer, `L` the loss; `|`
ends a stage, `*n` repeats the letter or the parenthesis before it, commas are decoration. Stage s
runs on pipeline rank s % PP.
Grammar: the documentation of the argument in core_v0.19.0 of github.com/NVIDIA/Megatron-LM.

Not covered: nested parentheses, which the engine does not read either.
"""

import re
from typing import Final

from tuner.engines.reading.launch import StageContent
from tuner.errors import SpecError
from tuner.spec.files import shown_value

MOST_LETTERS: Final = 100_000
"""Most letters of an expanded layout; more is a typing error."""
_LETTERS: Final = {"E": "embedding", "t": "transformer layer", "m": "MTP layer", "L": "loss"}
_GROUP: Final = re.compile(r"\(([^()]*)\)\*(\d{1,6})")
_LETTER: Final = re.compile(r"([A-Za-z|])\*(\d{1,6})")


def pipeline_layout(text: str, *, said: str) -> tuple[StageContent, ...]:
    """Return what every stage holds, in execution order.

    Args:
        text: the value of the argument.
        said: file and flag, for messages.

    Raises:
        SpecError: an unknown letter, a repetition that is none, or no single first embedding and
            last loss.
    """
    letters = _unrolled(text.replace(",", "").replace(" ", ""), said=said)
    for letter in letters:
        if letter not in _LETTERS and letter != "|":
            raise SpecError(
                f"{said} {shown_value(text)}: {letter!r} is no part of a layout; the letters are "
                + ", ".join(f"{name} ({what})" for name, what in _LETTERS.items())
            )
    flat = letters.replace("|", "")
    if not flat.startswith("E") or flat.count("E") != 1:
        raise SpecError(f"{said} {shown_value(text)}: must begin with its only E (embedding)")
    if not flat.endswith("L") or flat.count("L") != 1:
        raise SpecError(f"{said} {shown_value(text)}: must end with its only L (loss)")
    if "t" in flat[flat.find("m") :] and "m" in flat:
        raise SpecError(f"{said} {shown_value(text)}: every m must follow the last t")
    return tuple(
        StageContent(
            layers=stage.count("t"),
            embedding="E" in stage,
            mtp_layers=stage.count("m"),
            loss="L" in stage,
        )
        for stage in letters.split("|")
    )


def layout_text(stages: tuple[StageContent, ...]) -> str:
    """Write stages as Megatron reads them, repeats folded, e.g. `Et*3|(tt|)*29m|L`."""
    written = [
        "E" * stage.embedding
        + _times("t", stage.layers)
        + _times("m", stage.mtp_layers)
        + "L" * stage.loss
        for stage in stages
    ]
    parts: list[str] = []
    start = 0
    while start < len(written) - 1:
        end = start
        while end < len(written) - 1 and written[end] == written[start]:
            end += 1
        repeats = end - start
        plain = "t" * stages[start].layers if written[start].startswith("t") else written[start]
        parts.append(f"({plain}|)*{repeats}" if repeats > 2 else f"{written[start]}|" * repeats)
        start = end
    return "".join(parts) + written[-1]


def _times(letter: str, count: int) -> str:
    return f"{letter}*{count}" if count > 2 else letter * count


def _unrolled(text: str, *, said: str) -> str:
    for pattern in (_GROUP, _LETTER):
        length = sum(len(m.group(1)) * int(m.group(2)) for m in pattern.finditer(text))
        if length > MOST_LETTERS:
            raise SpecError(
                f"{said} {shown_value(text)}: expands to more than {MOST_LETTERS} parts"
            )
        text = pattern.sub(lambda m: m.group(1) * int(m.group(2)), text)
    return text
