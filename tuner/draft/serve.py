"""The simple spec of a deployment."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final, get_args

from tuner.catalog.serve_rules.autoscalers import AUTOSCALERS
from tuner.draft.draft import (
    HEAD,
    MACHINES,
    MODEL,
    Draft,
    FieldValues,
    SpecField,
    check_one_of,
    check_quantity,
    check_whole,
    cluster_lines,
    list_text,
    parse_targets,
    path_text,
)
from tuner.engines.serve_writers import SERVE_EMITTERS
from tuner.engines.serving.releases import ENGINES, engine_manifest
from tuner.errors import SpecError, TunerError
from tuner.goals.serve_spec import read_serve_spec
from tuner.spec.files import home_expanded
from tuner.spec.huggingface.quantization import released_quantization
from tuner.spec.huggingface.read import read_model
from tuner.spec.serving.goal import Engine, ServeGoal
from tuner.units import parse_per_s, parse_seconds


def parse_engine(text: str) -> Engine:
    """Read `vllm`, or `vllm@0.33.0`.

    Raises:
        SpecError: no engine or release of that name is described.
    """
    name, _, version = text.partition("@")
    check_one_of("engine", tuple(ENGINES))(name, {})
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


def _emit_serving(text: str, values: FieldValues) -> None:
    for name in parse_targets(text):
        check_one_of("emit", (*SERVE_EMITTERS, *AUTOSCALERS))(name, values)
        engine = values.get("engine", "").partition("@")[0]
        if name in ENGINES and name != engine:
            raise SpecError(f"--emit: {name!r} is another engine than {engine!r}; keep one")


def _input(text: str, values: FieldValues) -> None:
    check_whole("input-tokens")(text, values)
    _fits_in_model("input-tokens", int(text), values)


def _output(text: str, values: FieldValues) -> None:
    check_whole("output-tokens")(text, values)
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
    check_quantity("rate", parse_per_s)(text, values)


def _lines(values: FieldValues, folder: Path | None) -> Iterator[str]:
    yield HEAD.format(schema="serve-spec")
    yield "schema_version: 1"
    yield f"model: {path_text(values['model'], folder)}"
    yield from cluster_lines(values)
    yield "goal:"
    yield "  kind: serve"
    engine = parse_engine(values["engine"])
    version = f', version: "{engine.version}"' if engine.version else ""
    yield f"  engine: {{name: {engine.name}{version}}}"
    yield "  traffic:                          # or a recorded trace, or length distributions"
    load = "concurrency" if values["concurrency"] else "rate"
    yield f"    {load}: {values[load]}"
    yield f"    input_tokens: {values['input-tokens']}"
    yield f"    output_tokens: {values['output-tokens']}"
    yield "  slo:                              # mean, p50, p90, p99"
    yield f"    ttft: {{p90: {values['ttft']}}}"
    yield f"    tpot: {{p90: {values['tpot']}}}"
    yield f"  quantization: {values['quantization']}               # of the weights"
    yield f"  objective: {values['objective']}              # goodput | cost | devices | rate"
    yield f"emit: {list_text(values['emit'])}"


_FIELDS: Final = (
    MODEL,
    *MACHINES,
    SpecField(
        key="engine",
        default=next(iter(ENGINES)),
        check=_engine,
        derived=_named_engine,
    ),
    SpecField(
        key="concurrency",
        default="",
        check=check_whole("concurrency", largest=1_000_000),
    ),
    SpecField(
        key="rate",
        default="",
        check=_rate,
        unless="concurrency",
    ),
    SpecField(
        key="input-tokens",
        default="4000",
        check=_input,
    ),
    SpecField(
        key="output-tokens",
        default="1000",
        check=_output,
    ),
    SpecField(
        key="ttft",
        default="2s",
        check=check_quantity("ttft", parse_seconds),
    ),
    SpecField(
        key="tpot",
        default="50ms",
        check=check_quantity("tpot", parse_seconds),
    ),
    SpecField(
        key="quantization",
        default="bf16",
        check=check_one_of(
            "quantization", get_args(ServeGoal.model_fields["quantization"].annotation)
        ),
        derived=_released,
    ),
    SpecField(
        key="objective",
        default="goodput",
        check=check_one_of("objective", ("goodput", "cost", "devices", "rate")),
    ),
    SpecField(key="emit", default="local", check=_emit_serving),
)
DRAFT: Final = Draft(kind="serve", fields=_FIELDS, lines=_lines, check=read_serve_spec)
