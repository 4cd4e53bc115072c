"""Problems of specs on datasheets."""

from pathlib import Path

from tuner.goals.serve_plan import price_serving_pool
from tuner.search.serve.solve_mode import ServeProblem, build_serve_problem
from tuner.search.settings import SearchSettings
from tuner.spec.serving.read import read_serve_spec


def problem_of(path: Path) -> ServeProblem:
    """Price every pool of a spec."""
    spec = read_serve_spec(path)
    serving_pools = tuple(price_serving_pool(pool, ()) for pool in spec.cluster.pools)
    return build_serve_problem(spec, serving_pools, SearchSettings())
