"""What a spec needs to be told, question by question, each with its default and its check.

The key of a question is the flag that answers it too (`--sequence-length`). An answer is text, as
typed; a check reads it with the answers before it and refuses it in one line. A default of None has
to be answered, an empty one leaves the field out.

Not asked: what a spec can say beyond the simple case (several pools, profiles, recorded routing,
failures, distributions of lengths); the written file is the place to add it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from profilers.routing.store import read_recording
from tuner.devices.catalogue import find_device
from tuner.emit.serving.registry import SERVE_EMITTERS
from tuner.errors import SpecError, TunerError
from tuner.spec.capabilities import TARGETS, intersection
from tuner.spec.files import home_expanded, shown_value
from tuner.spec.goal import Precision
from tuner.spec.huggingface.quantization import released_quantization
from tuner.spec.huggingface.read import read_model
from tuner.spec.place import MOST_RANKS, Objective
from tuner.spec.place_targets import PLACE_TARGETS
from tuner.spec.serving.goal import Engine
from tuner.spec.serving.manifests.registry import ENGINES, manifest_of
from tuner.units import parse_per_s, parse_seconds

Goal = Literal["train", "serve", "place"]
GOALS: Final[tuple[Goal, ...]] = ("train", "serve", "place")
Answers = Mapping[str, str]
LARGEST: Final = 2**31
"""Of a count, as in a spec."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One thing to be told."""

    key: str
    """The flag without its dashes."""
    asks: str
    default: str | None
    check: Callable[[str, Answers], None]
    """Refuses an answer by SpecError."""
    unless: str = ""
    """Key of another question: one of the two has to be answered."""
    derived: Callable[[Answers], str] | None = None
    """Makes the default of what is known before, other flags included; empty: `default` stands."""

    def default_of(self, known: Answers) -> str | None:
        """Return the default, given what is known before.

        Raises:
            SpecError: nothing can be derived from what is known.
        """
        found = "" if self.derived is None else self.derived(known)
        return found or self.default


def questions_of(goal: Goal) -> tuple[Question, ...]:
    """Return what a spec of this goal needs, in the order of asking."""
    return {"train": _TRAIN, "serve": _SERVE, "place": _PLACE}[goal]


def checked_goal(text: str) -> Goal:
    """Read which of the three it is.

    Raises:
        SpecError: none of them.
    """
    for goal in GOALS:
        if text == goal:
            return goal
    raise SpecError(f"--goal: {shown_value(text)} is not one of {', '.join(GOALS)}")


def workloads_of(text: str) -> dict[str, Path]:
    """Read `chat=routing/chat,code=routing/code`.

    Raises:
        SpecError: a part is no name and path, or a name comes twice.
    """
    found: dict[str, Path] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, equals, path = part.partition("=")
        if not (name and equals and path):
            raise SpecError(f"--workload: {shown_value(part)} is not NAME=PATH of a recording")
        if name in found:
            raise SpecError(f"--workload: two are named {name!r}; give each its own name")
        found[name] = Path(path)
    if not found:
        raise SpecError("--workload: name at least one recording, NAME=PATH")
    return found


def machines_of(answers: Answers) -> tuple[int, int]:
    """Return nodes and devices of a node for a number of devices of a usual server.

    Raises:
        SpecError: they fill no whole number of servers.
    """
    sheet, devices = find_device(answers["device"]), int(answers["devices"])
    each = min(devices, sheet.devices_per_node)
    if devices % each:
        below = devices // each * each
        raise SpecError(
            f"--devices: {devices} fill no whole servers of {each} {sheet.name};"
            f" the nearest that do: {below} and {below + each}"
        )
    return devices // each, each


def _model(text: str, _answers: Answers) -> None:
    read_model(home_expanded(text))


def _device(text: str, _answers: Answers) -> None:
    find_device(text)


def _devices(text: str, answers: Answers) -> None:
    _whole("devices")(text, answers)
    machines_of({**answers, "devices": text})


def _whole(key: str, *, least: int = 1, most: int = LARGEST) -> Callable[[str, Answers], None]:
    def check(text: str, _answers: Answers) -> None:
        if not (text.isascii() and text.isdecimal() and least <= int(text) <= most):
            raise SpecError(
                f"--{key}: {shown_value(text)} is not a whole number in {least}..{most}"
            )

    return check


def _one_of(key: str, names: tuple[str, ...]) -> Callable[[str, Answers], None]:
    def check(text: str, _answers: Answers) -> None:
        if text not in names:
            raise SpecError(f"--{key}: {shown_value(text)} is not one of {', '.join(names)}")

    return check


def _quantity(key: str, parse: Callable[[str], float]) -> Callable[[str, Answers], None]:
    def check(text: str, _answers: Answers) -> None:
        try:
            value = parse(text)
        except ValueError as error:
            raise SpecError(f"--{key}: {error}") from error
        if value <= 0.0:
            raise SpecError(f"--{key}: {text!r} must be more than nothing")

    return check


def _input(text: str, answers: Answers) -> None:
    _whole("input-tokens")(text, answers)
    _fits_in_model("input-tokens", int(text), answers)


def _output(text: str, answers: Answers) -> None:
    _whole("output-tokens")(text, answers)
    _fits_in_model("output-tokens", int(answers["input-tokens"]) + int(text), answers)


def _fits_in_model(key: str, tokens: int, answers: Answers) -> None:
    longest = read_model(home_expanded(answers["model"])).max_position
    if tokens > longest:
        raise SpecError(
            f"--{key}: makes {tokens} tokens of a request, and the model takes {longest}"
        )


def _rate(text: str, answers: Answers) -> None:
    if answers.get("concurrency"):
        raise SpecError("--rate: --concurrency is a closed loop, --rate an open load; keep one")
    _quantity("rate", parse_per_s)(text, answers)


def targets_of(text: str) -> tuple[str, ...]:
    """Read names that are separated by commas; none where the answer is `none`."""
    names = tuple(filter(None, (piece.strip() for piece in text.split(","))))
    return () if names == ("none",) else names


def engine_of(text: str) -> Engine:
    """Read `vllm`, or `vllm@0.33.0`.

    Raises:
        SpecError: no engine or release of that name is described.
    """
    name, _, version = text.partition("@")
    _one_of("engine", tuple(ENGINES))(name, {})
    engine = Engine.model_validate({"name": name, "version": version})
    try:
        manifest_of(engine)
    except TunerError as error:
        raise SpecError(f"--engine: {str(error).partition(': ')[2]}") from error
    return engine


def _engine(text: str, _answers: Answers) -> None:
    engine_of(text)


def _named_engine(known: Answers) -> str:
    """Return the engine that the targets name; empty where they name none."""
    return next((name for name in targets_of(known.get("emit", "")) if name in ENGINES), "")


def _released(known: Answers) -> str:
    """Return the type that the model's weights were released in."""
    return released_quantization(home_expanded(known["model"]))


def _emit_training(text: str, _answers: Answers) -> None:
    intersection(targets_of(text))
    if not targets_of(text):
        raise SpecError(f"--emit: name at least one of {', '.join(TARGETS)}")


def _emit_serving(text: str, answers: Answers) -> None:
    for name in targets_of(text):
        _one_of("emit", tuple(SERVE_EMITTERS))(name, answers)
        engine = answers.get("engine", "").partition("@")[0]
        if name in ENGINES and name != engine:
            raise SpecError(f"--emit: {name!r} is another engine than {engine!r}; keep one")


def _emit_placement(text: str, answers: Answers) -> None:
    for name in targets_of(text):
        _one_of("emit", tuple(PLACE_TARGETS))(name, answers)


def _workloads(text: str, _answers: Answers) -> None:
    for path in workloads_of(text).values():
        read_recording(home_expanded(path))


_MODEL: Final = Question(
    key="model", asks="Hugging Face config.json, or its folder", default=None, check=_model
)
_MACHINES: Final = (
    Question(key="device", asks="device, e.g. h100-sxm", default=None, check=_device),
    Question(key="devices", asks="how many devices", default=None, check=_devices),
)
_TRAIN: Final = (
    _MODEL,
    *_MACHINES,
    Question(
        key="sequence-length",
        asks="tokens of one sequence",
        default="4096",
        check=_whole("sequence-length"),
    ),
    Question(
        key="batch", asks="sequences of one optimizer step", default="256", check=_whole("batch")
    ),
    Question(
        key="precision",
        asks="precision of matrix products",
        default="bf16",
        check=_one_of("precision", tuple(one.value for one in Precision)),
    ),
    Question(key="emit", asks="what to launch with", default="megatron-lm", check=_emit_training),
)
_SERVE: Final = (
    _MODEL,
    *_MACHINES,
    Question(
        key="engine",
        asks="engine, e.g. vllm or vllm@0.33.0",
        default="sglang",
        check=_engine,
        derived=_named_engine,
    ),
    Question(
        key="concurrency",
        asks="requests under way at any time (leave empty to state a rate)",
        default="",
        check=_whole("concurrency", most=1_000_000),
    ),
    Question(
        key="rate",
        asks="requests a second, e.g. 10/s",
        default="",
        check=_rate,
        unless="concurrency",
    ),
    Question(
        key="input-tokens",
        asks="tokens of a prompt",
        default="4000",
        check=_input,
    ),
    Question(
        key="output-tokens",
        asks="tokens of an answer",
        default="1000",
        check=_output,
    ),
    Question(
        key="ttft",
        asks="90 % of requests get their first token within",
        default="2s",
        check=_quantity("ttft", parse_seconds),
    ),
    Question(
        key="tpot",
        asks="and each further token within",
        default="50ms",
        check=_quantity("tpot", parse_seconds),
    ),
    Question(
        key="quantization",
        asks="weights",
        default="bf16",
        check=_one_of("quantization", ("bf16", "fp8", "fp8_block", "nvfp4", "mxfp4")),
        derived=_released,
    ),
    Question(
        key="objective",
        asks="what counts",
        default="goodput",
        check=_one_of("objective", ("goodput", "cost", "devices", "rate")),
    ),
    Question(key="emit", asks="what to launch with", default="local", check=_emit_serving),
)
_PLACE: Final = (
    Question(
        key="workload",
        asks="recordings, NAME=PATH, with commas between",
        default=None,
        check=_workloads,
    ),
    Question(
        key="ranks",
        asks="expert-parallel ranks",
        default=None,
        check=_whole("ranks", most=MOST_RANKS),
    ),
    Question(
        key="ranks-per-node",
        asks="of one machine (leave empty for all)",
        default="",
        check=_whole("ranks-per-node", most=MOST_RANKS),
    ),
    Question(
        key="redundant-experts",
        asks="redundant experts of a layer (leave empty for the fewest)",
        default="",
        check=_whole("redundant-experts", least=0, most=100_000),
    ),
    Question(
        key="objective",
        asks="what to make small",
        default="balance",
        # The other objectives need a model and machines, which are not asked for here.
        check=_one_of("objective", tuple(one.value for one in Objective)[:3]),
    ),
    Question(key="emit", asks="what to write it for", default="eplb", check=_emit_placement),
)
