"""The fields of a simple spec, each with its flag, prompt, default and check.

The key of a field is its flag (`--sequence-length`). A value is text, as typed; a check reads it
with the values of the fields before it and refuses it in one line. A default of None makes the
field mandatory, an empty one leaves it out.

Not covered: what a spec can say beyond the simple case (several pools, profiles, recorded routing,
failures, length distributions); add it to the written file.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from profilers.routing.store import read_recording
from tuner.devices.catalogue import find_device
from tuner.engines.capabilities import TARGETS, intersection
from tuner.engines.serve_capabilities import ENGINES, engine_manifest
from tuner.engines.serve_writers import SERVE_EMITTERS
from tuner.errors import SpecError, TunerError
from tuner.spec.files import home_expanded, shown_value
from tuner.spec.goal import Precision
from tuner.spec.huggingface.quantization import released_quantization
from tuner.spec.huggingface.read import read_model
from tuner.spec.place import MOST_RANKS, Objective
from tuner.spec.place_targets import PLACE_TARGETS
from tuner.spec.serving.goal import Engine
from tuner.units import parse_per_s, parse_seconds

Goal = Literal["train", "serve", "place"]
GOALS: Final[tuple[Goal, ...]] = ("train", "serve", "place")
FieldValues = Mapping[str, str]
LARGEST: Final = 2**31
"""Of a count, as in a spec."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecField:
    """One field of a simple spec."""

    key: str
    """The flag without its dashes."""
    prompt: str
    default: str | None
    check: Callable[[str, FieldValues], None]
    """Raises SpecError for an unacceptable value."""
    unless: str = ""
    """Key of another field: one of the two has to be set."""
    derived: Callable[[FieldValues], str] | None = None
    """Derives the default from known values, other flags included; empty: `default` is used."""

    def default_value(self, known: FieldValues) -> str | None:
        """Return the default, given the known values.

        Raises:
            SpecError: nothing can be derived from what is known.
        """
        derived = "" if self.derived is None else self.derived(known)
        return derived or self.default


def spec_fields(goal: Goal) -> tuple[SpecField, ...]:
    """Return the fields that a spec of this goal needs, in the order of the prompts."""
    return {"train": _TRAIN, "serve": _SERVE, "place": _PLACE}[goal]


def checked_goal(text: str) -> Goal:
    """Read the kind of the goal.

    Raises:
        SpecError: none of them.
    """
    for goal in GOALS:
        if text == goal:
            return goal
    raise SpecError(f"--goal: {shown_value(text)} is not one of {', '.join(GOALS)}")


def parse_workloads(text: str) -> dict[str, Path]:
    """Read `chat=routing/chat,code=routing/code`.

    Raises:
        SpecError: a part is no name and path, or a name comes twice.
    """
    paths: dict[str, Path] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, equals, path = part.partition("=")
        if not (name and equals and path):
            raise SpecError(f"--workload: {shown_value(part)} is not NAME=PATH of a recording")
        if name in paths:
            raise SpecError(f"--workload: two are named {name!r}; give each its own name")
        paths[name] = Path(path)
    if not paths:
        raise SpecError("--workload: name at least one recording, NAME=PATH")
    return paths


def split_into_nodes(values: FieldValues) -> tuple[int, int]:
    """Return nodes and devices per node for a number of devices in standard servers.

    Raises:
        SpecError: they fill no whole number of servers.
    """
    sheet, devices = find_device(values["device"]), int(values["devices"])
    each = min(devices, sheet.devices_per_node)
    if devices % each:
        below = devices // each * each
        raise SpecError(
            f"--devices: {devices} fill no whole servers of {each} {sheet.name};"
            f" the nearest that do: {below} and {below + each}"
        )
    return devices // each, each


def _model(text: str, _values: FieldValues) -> None:
    read_model(home_expanded(text))


def _device(text: str, _values: FieldValues) -> None:
    find_device(text)


def _devices(text: str, values: FieldValues) -> None:
    _whole("devices")(text, values)
    split_into_nodes({**values, "devices": text})


def _whole(key: str, *, least: int = 1, most: int = LARGEST) -> Callable[[str, FieldValues], None]:
    def check(text: str, _values: FieldValues) -> None:
        if not (text.isascii() and text.isdecimal() and least <= int(text) <= most):
            raise SpecError(
                f"--{key}: {shown_value(text)} is not a whole number in {least}..{most}"
            )

    return check


def _one_of(key: str, names: tuple[str, ...]) -> Callable[[str, FieldValues], None]:
    def check(text: str, _values: FieldValues) -> None:
        if text not in names:
            raise SpecError(f"--{key}: {shown_value(text)} is not one of {', '.join(names)}")

    return check


def _quantity(key: str, parse: Callable[[str], float]) -> Callable[[str, FieldValues], None]:
    def check(text: str, _values: FieldValues) -> None:
        try:
            value = parse(text)
        except ValueError as error:
            raise SpecError(f"--{key}: {error}") from error
        if value <= 0.0:
            raise SpecError(f"--{key}: {text!r} must be more than nothing")

    return check


def _input(text: str, values: FieldValues) -> None:
    _whole("input-tokens")(text, values)
    _fits_in_model("input-tokens", int(text), values)


def _output(text: str, values: FieldValues) -> None:
    _whole("output-tokens")(text, values)
    _fits_in_model("output-tokens", int(values["input-tokens"]) + int(text), values)


def _fits_in_model(key: str, tokens: int, values: FieldValues) -> None:
    longest = read_model(home_expanded(values["model"])).max_position
    if tokens > longest:
        raise SpecError(
            f"--{key}: makes {tokens} tokens of a request, and the model takes {longest}"
        )


def _rate(text: str, values: FieldValues) -> None:
    if values.get("concurrency"):
        raise SpecError("--rate: --concurrency is a closed loop, --rate an open load; keep one")
    _quantity("rate", parse_per_s)(text, values)


def parse_targets(text: str) -> tuple[str, ...]:
    """Read comma-separated names; none for `none`."""
    names = tuple(filter(None, (piece.strip() for piece in text.split(","))))
    return () if names == ("none",) else names


def parse_engine(text: str) -> Engine:
    """Read `vllm`, or `vllm@0.33.0`.

    Raises:
        SpecError: no engine or release of that name is described.
    """
    name, _, version = text.partition("@")
    _one_of("engine", tuple(ENGINES))(name, {})
    engine = Engine.model_validate({"name": name, "version": version})
    try:
        engine_manifest(engine)
    except TunerError as error:
        raise SpecError(f"--engine: {str(error).partition(': ')[2]}") from error
    return engine


def _engine(text: str, _values: FieldValues) -> None:
    parse_engine(text)


def _named_engine(known: FieldValues) -> str:
    """Return the engine among the launch targets; empty if there is none."""
    return next((name for name in parse_targets(known.get("emit", "")) if name in ENGINES), "")


def _released(known: FieldValues) -> str:
    """Return the type that the model's weights were released in."""
    return released_quantization(home_expanded(known["model"]))


def _emit_training(text: str, _values: FieldValues) -> None:
    intersection(parse_targets(text))
    if not parse_targets(text):
        raise SpecError(f"--emit: name at least one of {', '.join(TARGETS)}")


def _emit_serving(text: str, values: FieldValues) -> None:
    for name in parse_targets(text):
        _one_of("emit", tuple(SERVE_EMITTERS))(name, values)
        engine = values.get("engine", "").partition("@")[0]
        if name in ENGINES and name != engine:
            raise SpecError(f"--emit: {name!r} is another engine than {engine!r}; keep one")


def _emit_placement(text: str, values: FieldValues) -> None:
    for name in parse_targets(text):
        _one_of("emit", tuple(PLACE_TARGETS))(name, values)


def _workloads(text: str, _values: FieldValues) -> None:
    for path in parse_workloads(text).values():
        read_recording(home_expanded(path))


_MODEL: Final = SpecField(
    key="model", prompt="Hugging Face config.json, or its folder", default=None, check=_model
)
_MACHINES: Final = (
    SpecField(key="device", prompt="device, e.g. h100-sxm", default=None, check=_device),
    SpecField(key="devices", prompt="number of devices", default=None, check=_devices),
)
_TRAIN: Final = (
    _MODEL,
    *_MACHINES,
    SpecField(
        key="sequence-length",
        prompt="sequence length in tokens",
        default="4096",
        check=_whole("sequence-length"),
    ),
    SpecField(
        key="batch", prompt="global batch size in sequences", default="256", check=_whole("batch")
    ),
    SpecField(
        key="precision",
        prompt="GEMM precision",
        default="bf16",
        check=_one_of("precision", tuple(one.value for one in Precision)),
    ),
    SpecField(key="emit", prompt="launch targets", default="megatron-lm", check=_emit_training),
)
_SERVE: Final = (
    _MODEL,
    *_MACHINES,
    SpecField(
        key="engine",
        prompt="engine, e.g. vllm or vllm@0.33.0",
        default="sglang",
        check=_engine,
        derived=_named_engine,
    ),
    SpecField(
        key="concurrency",
        prompt="concurrent requests (leave empty to give a rate)",
        default="",
        check=_whole("concurrency", most=1_000_000),
    ),
    SpecField(
        key="rate",
        prompt="request rate, e.g. 10/s",
        default="",
        check=_rate,
        unless="concurrency",
    ),
    SpecField(
        key="input-tokens",
        prompt="input tokens per request",
        default="4000",
        check=_input,
    ),
    SpecField(
        key="output-tokens",
        prompt="output tokens per request",
        default="1000",
        check=_output,
    ),
    SpecField(
        key="ttft",
        prompt="SLO on P90 TTFT",
        default="2s",
        check=_quantity("ttft", parse_seconds),
    ),
    SpecField(
        key="tpot",
        prompt="SLO on P90 TPOT",
        default="50ms",
        check=_quantity("tpot", parse_seconds),
    ),
    SpecField(
        key="quantization",
        prompt="quantization of the weights",
        default="bf16",
        check=_one_of("quantization", ("bf16", "fp8", "fp8_block", "nvfp4", "mxfp4")),
        derived=_released,
    ),
    SpecField(
        key="objective",
        prompt="objective",
        default="goodput",
        check=_one_of("objective", ("goodput", "cost", "devices", "rate")),
    ),
    SpecField(key="emit", prompt="launch targets", default="local", check=_emit_serving),
)
_PLACE: Final = (
    SpecField(
        key="workload",
        prompt="routing recordings, NAME=PATH, comma-separated",
        default=None,
        check=_workloads,
    ),
    SpecField(
        key="ranks",
        prompt="expert-parallel ranks",
        default=None,
        check=_whole("ranks", most=MOST_RANKS),
    ),
    SpecField(
        key="ranks-per-node",
        prompt="ranks per node (leave empty for a single node)",
        default="",
        check=_whole("ranks-per-node", most=MOST_RANKS),
    ),
    SpecField(
        key="redundant-experts",
        prompt="redundant experts per layer (leave empty for the fewest)",
        default="",
        check=_whole("redundant-experts", least=0, most=100_000),
    ),
    SpecField(
        key="objective",
        prompt="objective",
        default="balance",
        # The other objectives need a model and machines, which are no fields here.
        check=_one_of("objective", tuple(one.value for one in Objective)[:3]),
    ),
    SpecField(key="emit", prompt="launch targets", default="eplb", check=_emit_placement),
)
