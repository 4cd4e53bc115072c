from collections.abc import Callable

from tests.rows import each_row
from tuner.search.reference.engine_workload import load_ratios
from tuner.spec.goal import Phase
from tuner.spec.model import ModelSpec
from tuner.spec.routing import RoutingRecord


def _one_hot(expert: int) -> tuple[float, ...]:
    return tuple(float(other == expert) for other in range(8))


def _record(*layer_ids: int, passes: bool = False) -> RoutingRecord:
    """Layer i sends everything to expert i; early passes to expert 7."""
    rows = tuple(_one_hot(layer) for layer in layer_ids)
    early = (_one_hot(7),) * len(rows)
    return RoutingRecord(
        name="made up",
        num_experts=8,
        layer_ids=layer_ids,
        load_ratios=rows,
        passes=(early, rows, rows, rows) if passes else (),
    )


@each_row(
    ("layers", "recorded", "taken"),
    [
        ("mmmm", (0, 1, 2, 3), (0, 1, 2, 3)),
        # Layer 2 lies between 1 and 3: the earlier one.
        ("mmmm", (1, 3), (1, 1, 1, 3)),
        ("mmmm", (0, 3), (0, 0, 3, 3)),
        # Absolute layer numbers: the dense layers have none of their own.
        ("ddmm", (3,), (3, 3)),
        ("mdmdm", (0, 4), (0, 0, 4)),
    ],
)
def test_a_layer_takes_the_loads_of_the_nearest_recorded_one(
    tiny_model: Callable[..., ModelSpec],
    layers: str,
    recorded: tuple[int, ...],
    taken: tuple[int, ...],
) -> None:
    filled = load_ratios(tiny_model(layers=layers), _record(*recorded), Phase.STEADY)
    assert filled == tuple(_one_hot(expert) for expert in taken)


def test_the_phase_chooses_among_the_passes(tiny_model: Callable[..., ModelSpec]) -> None:
    record = _record(0, passes=True)
    model = tiny_model(layers="mm")
    assert load_ratios(model, record, Phase.EARLY) == (_one_hot(7),) * 2
    assert load_ratios(model, record, Phase.STEADY) == (_one_hot(0),) * 2
