"""The field types of a spec: quantities with units, paths relative to the file, bounded counts.

A quantity is text with a unit in the file and an SI number in memory. Code may build the records
with SI numbers directly; a file may not, because a bare `400` has no unit. The validation context
distinguishes the two: reading a file passes a `SpecFolder`. A plan passes one when it is written.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    SerializationInfo,
    ValidationInfo,
    WithJsonSchema,
)

from tuner.spec.files import home_expanded
from tuner.units import (
    parse_bytes,
    parse_bytes_per_s,
    parse_per_s,
    parse_seconds,
    parse_share,
    parse_share_per_s,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecFolder:
    """Context while a spec is read, or a plan written."""

    folder: Path
    """Folder that relative paths start from."""


def _quantity(parse: Callable[[str], float], example: str) -> Callable[[Any, ValidationInfo], Any]:
    def read(value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, str):
            return parse(value)
        if isinstance(value, bool) or isinstance(info.context, SpecFolder):
            raise ValueError(  # noqa: TRY004 - pydantic reports no other kind
                f"{value!r} has no unit; write it like {example!r}"
            )
        return value

    return read


def _text_schema(example: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "examples": [example]})


Bytes = Annotated[
    int,
    Field(gt=0, le=2**63),
    BeforeValidator(_quantity(parse_bytes, "80GiB")),
    _text_schema("80GiB"),
]
"""Bytes; in a file a size with its unit."""

Seconds = Annotated[
    float,
    Field(ge=0.0, allow_inf_nan=False),
    BeforeValidator(_quantity(parse_seconds, "10min")),
    _text_schema("10min"),
]
"""Seconds; in a file a duration with its unit."""


def former(value: str, instead: str) -> BeforeValidator:
    """Refuse a value that earlier releases took, with what to write instead."""

    def check(given: object) -> object:
        if given == value:
            raise ValueError(f"{value!r} is read no more: {instead}")
        return given

    return BeforeValidator(check)


PositiveSeconds = Annotated[
    float,
    Field(gt=0.0, allow_inf_nan=False),
    BeforeValidator(_quantity(parse_seconds, "10min")),
    _text_schema("10min"),
]
"""Seconds, positive."""

BytesPerSecond = Annotated[
    float,
    Field(gt=0.0, allow_inf_nan=False),
    BeforeValidator(_quantity(parse_bytes_per_s, "400Gbit/s")),
    _text_schema("400Gbit/s"),
]
"""Bytes per second; in a file a bandwidth with its unit."""

SharePerSecond = Annotated[
    float,
    Field(gt=0.0, allow_inf_nan=False),
    BeforeValidator(_quantity(parse_share_per_s, "1% per week")),
    _text_schema("1% per week"),
]
"""Share per second; in a file a percentage of a period."""

Share = Annotated[
    float,
    Field(gt=0.0, le=1.0, allow_inf_nan=False),
    BeforeValidator(_quantity(parse_share, "2%")),
    _text_schema("2%"),
]
"""A share above zero; in a file a percentage."""

PerSecond = Annotated[
    float,
    Field(gt=0.0, allow_inf_nan=False),
    BeforeValidator(_quantity(parse_per_s, "20/s")),
    _text_schema("20/s"),
]
"""Events per second; in a file a rate with its unit."""


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"{str(value).lower()} is not a number")  # noqa: TRY004 - pydantic reports no other kind
    return value


def _whole(value: Any) -> Any:
    if isinstance(value, str):
        raise ValueError(f"{value!r} is text, not a whole number")  # noqa: TRY004 - pydantic reports no other kind
    return _no_bool(value)


Count = Annotated[int, Field(ge=1, le=2**31), BeforeValidator(_whole)]
"""A positive integer."""

Number = Annotated[float, Field(gt=0.0, allow_inf_nan=False), BeforeValidator(_no_bool)]
"""A positive finite number."""

NotNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False), BeforeValidator(_no_bool)]
"""A finite number, zero included."""


def one_or_many(value: Any) -> Any:
    """Accept a single value without brackets."""
    return value if isinstance(value, list | tuple | dict) or value is None else (value,)


Name = Annotated[str, Field(min_length=1, max_length=200)]
"""A name that the user chose."""


def _resolve(path: Path, info: ValidationInfo) -> Path:
    if not isinstance(info.context, SpecFolder):
        return path
    return info.context.folder / home_expanded(path)


def _written(path: Path, info: SerializationInfo) -> str:
    return str(info.context.folder / path if isinstance(info.context, SpecFolder) else path)


def _path_text(value: Any) -> Any:
    if isinstance(value, str) and not value:
        raise ValueError("the path is empty")
    if isinstance(value, str) and "\0" in value:
        raise ValueError("the path holds a null character")
    return value


FilePath = Annotated[
    Path,
    BeforeValidator(_path_text),
    AfterValidator(_resolve),
    PlainSerializer(_written, when_used="json"),
    WithJsonSchema({"type": "string"}),
]
"""A path; in a spec relative to the file, in the folder of a plan absolute."""
