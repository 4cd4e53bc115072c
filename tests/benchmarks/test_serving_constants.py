"""What is chosen without each pair, and that values are really set."""

import importlib.util
from pathlib import Path

from tests.rows import each_row

SCRIPT = Path(__file__).with_name("serving_constants.py")
spec = importlib.util.spec_from_file_location("serving_constants", SCRIPT)
assert spec is not None
assert spec.loader is not None
constants = importlib.util.module_from_spec(spec)
spec.loader.exec_module(constants)

CELLS = {
    "silicon_data_source": "db-dump/1; silicon_concurrency=2",
    "backend": "sglang",
    "model_path": "meta-llama/Llama-3.1-70B",
    "system": "h200_sxm",
    "precision": "fp8",
    "mode": "agg",
    "isl": "512",
    "osl": "64",
    "tp_size": "4",
    "silicon_ttft_ms": "100",
    "silicon_tpot_ms": "10",
}


def test_a_pair_is_evaluated_with_the_value_that_the_other_pairs_choose() -> None:
    shipped = {("a", "documented"): 0.1, ("b", "documented"): 0.3, ("c", "documented"): 0.3}
    other = {("a", "documented"): 0.3, ("b", "documented"): 0.2, ("c", "documented"): 0.2}
    printed = constants.chosen("x", {constants.SHIPPED: shipped, "half": other})
    # Without a: half. Without b or c: 0.1 + 0.3 against 0.3 + 0.2.
    assert printed == "x: chosen half 1 times, as shipped 2 times; left-out pairs +6.67 points"


@each_row("constant", ["SGLang's client", "steps before a token", "scheduler"])
def test_every_value_moves_the_errors_and_is_taken_back(constant: str) -> None:
    shipped = constants.summarise_errors([CELLS], [], ())
    for patches in constants.VARIANTS[constant].values():
        assert constants.summarise_errors([CELLS], [], patches) != shipped
    assert constants.summarise_errors([CELLS], [], ()) == shipped
