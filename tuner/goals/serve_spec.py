"""Reader of specs whose goal is `serve`: from a file to a `ServeSpec` with its model."""

from collections.abc import Iterable
from pathlib import Path
from typing import get_args

from tuner.catalog.serve_rules.autoscalers import AUTOSCALERS
from tuner.catalog.serve_rules.manifest import ServingCapabilities
from tuner.engines.serving.releases import ENGINE_TRAITS, ENGINES, releases_by_pool, target_refusals
from tuner.errors import SpecError, UnknownTargetError
from tuner.spec.cluster import Cluster
from tuner.spec.files import shown_path
from tuner.spec.huggingface.read import read_model
from tuner.spec.model import ModelSpec
from tuner.spec.serving.goal import Mode, ServeGoal
from tuner.spec.serving.lengths import LengthLaw, quantile_tokens
from tuner.spec.serving.spec import ServeSpec, ServeSpecFile
from tuner.spec.spec_file import read_spec_keys, validate_spec


def read_serve_spec(path: Path, *, any_release: bool = False) -> ServeSpec:
    """Read a deployment's spec and the files that it names.

    Args:
        path: of the spec.
        any_release: `goal.engine.version` may be a release that is not described; the newest one
            stands for it, and it is kept apart.

    Raises:
        SpecError: one line: the file, the field's path, its value, the rule.
    """
    source = shown_path(path)
    file = validate_spec(read_spec_keys(path), path, ServeSpecFile)
    model = read_model(file.model)
    goal, release = file.goal, ""
    version = goal.engine.version
    if any_release and version not in {
        engine.release for engine in ENGINES.get(goal.engine.name, ())
    }:
        release = version
        unnamed = goal.engine.model_copy(update={"version": ""})
        goal = goal.model_copy(update={"engine": unnamed})
    _check_lengths(goal, model, source)
    _check_prices(goal, file.cluster, source)
    releases = _releases(goal, file.cluster, source)
    _check_autoscaler(file, releases.values(), source)
    goals = goals_by_formats(goal, model, file.cluster)
    return ServeSpec(
        path=path,
        model_path=file.model,
        model=model,
        cluster=file.cluster,
        goal=goals[0].model_copy(update={"formats": goal.formats}),
        emit=file.emit,
        releases=releases,
        target_refusals={mode: target_refusals(file.emit, mode) for mode in get_args(Mode)},
        release=release,
    )


def goals_by_formats(goal: ServeGoal, model: ModelSpec, cluster: Cluster) -> tuple[ServeGoal, ...]:
    """Return a goal for each pair of formats that its spec leaves open, in the spec's order."""
    stated = [formats.model_dump(exclude_none=True) for formats in goal.formats]
    return tuple(
        _with_cache(goal.model_copy(update=formats | {"formats": ()}), model, cluster)
        for formats in stated or [{}]
    )


def _with_cache(goal: ServeGoal, model: ModelSpec, cluster: Cluster) -> ServeGoal:
    """State the type of the cache, where the spec leaves it to the engine."""
    if "kv_cache_dtype" in goal.model_fields_set:
        return goal
    pool = cluster.pools[0]
    generation = None if pool.device is None else pool.sheet.generation
    cache_dtype = ENGINE_TRAITS[goal.engine_on(pool.name).name].auto_cache(model, generation)
    return (
        goal
        if cache_dtype == goal.kv_cache_dtype
        else goal.model_copy(update={"kv_cache_dtype": cache_dtype})
    )


def _releases(goal: ServeGoal, cluster: Cluster, source: str) -> dict[str, ServingCapabilities]:
    """Find the release that serves on each pool with a device."""
    names = [pool.name for pool in cluster.pools]
    unknown = [name for name in goal.engines if name not in names]
    if unknown:
        raise SpecError(
            f"{source}: goal.engines: no pool is named {unknown[0]!r}; pools: {', '.join(names)}"
        )
    try:
        return releases_by_pool(
            goal, tuple(pool for pool in cluster.pools if pool.device is not None)
        )
    except UnknownTargetError as error:
        raise SpecError(f"{source}: {error}") from None


def _check_prices(goal: ServeGoal, cluster: Cluster, source: str) -> None:
    free = [pool.name for pool in cluster.pools if pool.price_per_device_hour is None]
    if goal.objective == "cost" and free:
        raise SpecError(
            f"{source}: goal.objective: cost needs the price of every pool; state"
            f" price_per_device_hour of {free[0]!r}, or choose goodput or devices"
        )


def _check_autoscaler(
    file: ServeSpecFile, releases: Iterable[ServingCapabilities], source: str
) -> None:
    """Refuse an autoscaler that has nothing to scale, or no load to go by."""
    goal, named = file.goal, [name for name in AUTOSCALERS if name in file.emit]
    if not named:
        if goal.autoscaler is not None:
            raise SpecError(
                f"{source}: goal.autoscaler: emit names none; add {' or '.join(AUTOSCALERS)}"
            )
        return
    name = named[0]
    unread = [release.title for release in releases if release.load_metrics is None]
    rules = {
        f"{' and '.join(named)} would both set the number of instances; keep one": len(named) > 1,
        f"{name} scales the instances of kubernetes; write [kubernetes, {name}]": "kubernetes"
        not in file.emit,
        f"{name} adds instances by running and waiting requests, and what is emitted for"
        f" {''.join(unread[:1])} exports no count of them; serve with vllm or sglang": unread,
        f"{name} needs goal.slo, which says how many requests an instance holds": not (
            goal.slo.is_stated
        ),
        f"{name} needs an open load (goal.traffic.rate, with an arrival where there is a trace):"
        " its requests in flight say how many instances are needed": goal.traffic.rate is None
        or goal.traffic.is_replayed,
    }
    if refusal := next((rule for rule, is_broken in rules.items() if is_broken), None):
        raise SpecError(f"{source}: emit: {refusal}")


def _check_lengths(goal: ServeGoal, model: ModelSpec, source: str) -> None:
    longest = goal.max_model_len or model.max_position
    if longest > model.max_position:
        raise SpecError(
            f"{source}: goal.max_model_len: {longest} exceeds the {model.max_position} positions of"
            f" {model.name}; lower it, or raise max_position_embeddings in a copy of config.json"
            " that scales them"
        )
    laws = (goal.traffic.input_tokens, goal.traffic.output_tokens)
    needed = sum(quantile_tokens(law, ratio=0.5) for law in laws if isinstance(law, LengthLaw))
    if needed > longest:
        raise SpecError(
            f"{source}: goal.traffic: half of the requests have more than {needed:.0f} tokens, and"
            f" max_model_len is {longest}"
        )
