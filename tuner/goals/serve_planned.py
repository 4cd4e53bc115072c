"""Inputs that a deployment was planned from, read back from its folder to be simulated again."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from tuner.config.serve import ServeDecision
from tuner.goals.goal import PlannedSpec, pools_of, profiled_memory, use_planned_profiles
from tuner.goals.planned_spec import read_planned_spec
from tuner.goals.serve_kernels import kernels_changed
from tuner.goals.serve_plan import PROFILE, price_serving_pools
from tuner.goals.serve_spec import read_serve_spec
from tuner.paths import AnyPath, plan_folder
from tuner.plans.folder import name_used_profiles
from tuner.plans.serve import ServePlan, ServePrediction
from tuner.search.serve.demand import PrefixHits
from tuner.search.serve.planned_instances import at_planned_rate, batch_neighbours
from tuner.search.serve.prefix_reuse import recorded_prompts
from tuner.search.serve.solve_mode import build_serve_problem
from tuner.search.settings import SearchSettings
from tuner.spec.serving.spec import ServeSpec
from tuner.spec.spec_file import Keys


def planned_keys(plan: ServePlan, keys: Keys, used: Path) -> PlannedSpec:
    """Return the keys of a plan's spec, with the paths of what it was made from."""
    goal, stored = keys["goal"], plan.goal
    if stored.traffic.trace is not None:
        goal["traffic"]["trace"] = str(stored.traffic.trace.absolute())
    if stored.routing is not None:
        goal["routing"]["path"] = str(stored.routing.path.absolute())
    if stored.placement is not None:
        goal["placement"] = str(stored.placement.absolute())
    if goal.pop("formats", None):
        goal |= {"quantization": stored.quantization, "kv_cache_dtype": stored.kv_cache_dtype}
    use_planned_profiles(keys, plan.cluster)
    sources = plan.provenance.profile_source
    name_used_profiles(
        pools_of(keys), [name for name, source in sources.items() if source == PROFILE], used
    )
    return PlannedSpec(
        keys=keys,
        cluster=plan.cluster,
        residual=plan.provenance.residual,
        memory_bytes=profiled_memory(keys),
    )


def read_planned_serve_spec(folder: Path, plan: ServePlan) -> ServeSpec:
    """Read the spec of a plan at the rate that it was planned for."""
    keys = read_planned_spec(folder, plan, planned_keys).keys
    with tempfile.TemporaryDirectory(prefix="moetune-") as scratch:
        path = Path(scratch) / "spec.yaml"
        path.write_text(yaml.safe_dump(dict(keys), sort_keys=False), encoding="utf-8")
        return at_planned_rate(read_serve_spec(path), plan.goal)


def recorded_hits(spec: ServeSpec, plan: ServePlan) -> PrefixHits | None:
    """Return the hits of a recorded trace on the caches of a plan."""
    if plan.prefix_reuse is None or plan.predicted is None:
        return None
    prompts = recorded_prompts(spec, rate_per_s=plan.predicted.requests_per_s)
    return None if prompts is None else prompts.under(plan.prefix_reuse)


def other_kernels(plan: ServePlan, profiles: Sequence[Path]) -> tuple[str, ...]:
    """Say whose kernels changed since; the plan holds those that describe their own devices."""
    sources, hashes = plan.provenance.profile_source, plan.provenance.kernels_sha256
    given = {name: digest for name, digest in hashes.items() if sources.get(name) != PROFILE}
    return kernels_changed(given, plan.cluster, profiles)


def neighbours(folder: AnyPath, plan: ServePlan) -> Mapping[ServeDecision, ServePrediction]:
    """Price the neighbours of a plan's choice, with the kernels of the plan.

    Raises:
        PlanUnreadableError: the folder no longer has its spec.
        SpecError: the spec can no longer be read.
    """
    traffic = plan.goal.traffic
    if traffic.trace is not None or other_kernels(plan, ()):
        return {}
    spec = read_planned_serve_spec(plan_folder(folder), plan)
    priced_pools = price_serving_pools(spec, (), residual=plan.provenance.residual)
    hits = recorded_hits(spec, plan)
    return batch_neighbours(
        build_serve_problem(spec, priced_pools, SearchSettings(), hits=hits), plan
    )
