"""Sizes that planning a spec looks up, so that a profile can measure them, goal by goal.

Those of the reference step are listed from its operations. Everything else is planned, on the
datasheets of the spec's pools, and notes what it looks up; the plan itself is thrown away.
"""

from dataclasses import replace
from pathlib import Path
from typing import Final

from tuner.errors import UnknownDeviceError
from tuner.prices.lookups import Lookups, NotedPrices, WantedSizes
from tuner.search.settings import SearchSettings
from tuner.spec.cluster import Pool
from tuner.verify.launches import REFERENCE

TIME_LIMIT_S: Final = 20.0
"""Time limit of each search, seconds."""


def train_sizes(spec_path: Path) -> WantedSizes:
    """List what planning a training run looks up.

    Raises:
        SpecError: the spec is unusable.
    """
    from tuner.costs.train.calibration import shipped
    from tuner.costs.train.measured_profile import DTYPE_OF
    from tuner.goals.train_plan import refuse_unlaunchable, refuse_unpriced
    from tuner.goals.train_spec import read_spec
    from tuner.prices.datasheet import DatasheetPrices
    from tuner.search.reference.shapes import cases_for
    from tuner.search.train.build_problem import build_problem, price_pool
    from tuner.search.train.search import search

    spec = read_spec(spec_path)
    is_reference = set(spec.programs.chosen) <= {REFERENCE, "torchrun"}
    pools = spec.cluster.pools
    if (is_reference and len(pools) == 1) or not all(map(_is_described, pools)):
        refuse_unpriced(spec)
        return WantedSizes(cases=cases_for(spec))
    refuse_unlaunchable(spec)
    lookups, dtype = Lookups(), DTYPE_OF[spec.goal.precision.value]
    for pool in pools:
        problem = build_problem(spec, price_pool(pool, residuals=shipped()))
        datasheet_prices = DatasheetPrices(hardware=problem.hardware, constants=problem.constants)
        noting = replace(
            problem, prices=NotedPrices(source=datasheet_prices, lookups=lookups, dtype=dtype)
        )
        search(noting, SearchSettings(time_limit_s=TIME_LIMIT_S))
    return lookups.wanted()


def serve_sizes(spec_path: Path) -> WantedSizes:
    """List what planning a deployment looks up.

    Raises:
        SpecError: the spec is unusable.
    """
    from tuner.goals.serve_plan import deploy

    lookups = Lookups()
    deploy(spec_path, time_limit_s=TIME_LIMIT_S, lookups=lookups)
    return lookups.wanted()


def place_sizes(spec_path: Path) -> WantedSizes:
    """List what planning a placement looks up; nothing where it prices no layers.

    Raises:
        SpecError: the spec is unusable.
    """
    from tuner.goals.place_plan import is_priced, place
    from tuner.goals.place_spec import read_place_spec

    spec = read_place_spec(spec_path)
    if spec.cluster is None or not is_priced(spec):
        return WantedSizes(cases=())
    lookups = Lookups()
    place(spec_path, time_limit_s=TIME_LIMIT_S, lookups=lookups)
    return lookups.wanted()


def _is_described(pool: Pool) -> bool:
    try:
        return pool.device is not None and bool(pool.sheet)
    except UnknownDeviceError:
        return False
