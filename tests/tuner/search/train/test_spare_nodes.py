"""How many nodes train and how many are spares, where the spec leaves it open."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tests.expect import present, refused
from tests.printed import unwrapped
from tests.rows import Failures
from tests.tuner.search.train import test_fewer_nodes as fewer_nodes
from tests.tuner.search.train.test_fewer_nodes import plan_keys
from tuner.cli.app import app
from tuner.cli.plan_text import plan_text
from tuner.errors import SpecError
from tuner.faults.forecast import RunForecast
from tuner.faults.spare_choice import CLOSE_RATIO, NodeRatio, SpareChoice, choose_numbers
from tuner.goals.train_folder import read_plan, write_plan
from tuner.goals.train_plan import Planned
from tuner.report.run_section import run_notes

POOL: dict[str, Any] = {"name": "a", "device": "h100-sxm", "nodes": 4, "devices_per_node": 2}
LIMITS: dict[str, Any] = fewer_nodes.LIMITS | {
    "pipeline_model_parallel_size": [1, 2],
    "virtual_pipeline_model_parallel_size": [1],
    "zero_stage": [1],
}


def _keys(**reliability: Any) -> dict[str, Any]:
    keys = fewer_nodes.spec_keys(**({"without_spare": None} | reliability))
    return keys | {
        "cluster": {"pools": [dict(POOL)]},
        "goal": keys["goal"] | {"global_batch_size": 480},
        "search": dict(LIMITS),
        "emit": ["megatron-lm", "slurm"],
    }


def _run(made: Planned) -> RunForecast:
    return present(present(made.plan.predicted).run)


def _choice(made: Planned) -> SpareChoice:
    return present(_run(made).spares)


def _step_s(made: Planned) -> float:
    return present(made.plan.predicted).step_time_s


def _fastest_s(made: Planned) -> float:
    return made.plan.preferred.fastest_step_s if made.plan.preferred else _step_s(made)


def test_the_chosen_numbers_are_the_best_of_all_that_can_be_stated(
    tmp_path: Path, failures: Failures
) -> None:
    # Three nodes where every number of nodes has a layout for one less, too.
    for without_spare, all_nodes in (("wait", POOL["nodes"]), ("auto", 3)):
        stated: dict[tuple[int, int], Planned] = {}
        for spares in range(3):
            for nodes in range(2, all_nodes - spares + 1):
                keys = _keys(spare_nodes=spares, without_spare=without_spare)
                keys["cluster"]["pools"][0]["nodes"] = nodes + spares
                stated[nodes, spares] = plan_keys(keys, tmp_path)
        # With the fastest step that was found, instead of a preferred one.
        scales = {pair: _step_s(one) / _fastest_s(one) for pair, one in stated.items()}
        goodputs = {
            pair: _run(one).goodput_tokens_per_s * scales[pair] for pair, one in stated.items()
        }
        bills = {
            pair: present(_run(one).device_hours) / scales[pair] for pair, one in stated.items()
        }
        for objective in ("goodput", "cost"):
            keys = _keys(spare_nodes="auto", objective=objective, without_spare=without_spare)
            keys["cluster"]["pools"][0]["nodes"] = all_nodes
            made = plan_keys(keys, tmp_path)
            choice = _choice(made)
            pair = (choice.chosen.nodes, choice.chosen.spare_nodes)
            with failures.of((without_spare, objective, pair)):
                assert choice.pool_nodes == all_nodes
                assert choice.fewest_searched == 2
                assert present(made.plan.decision).num_devices == 2 * pair[0]
                assert made.plan.cluster.pools[0].nodes == sum(pair)
                # It is the plan of a spec that states these numbers.
                assert made.plan.decision == stated[pair].plan.decision
                assert _run(made).goodput_tokens_per_s == _run(stated[pair]).goodput_tokens_per_s
                # The best of all, but for what a simulated step and a preferred one differ in.
                if objective == "goodput":
                    assert goodputs[pair] >= 0.997 * max(goodputs.values())
                else:
                    assert bills[pair] <= 1.003 * min(bills.values())


def test_a_choice_counts_on_what_the_plan_can_do(tmp_path: Path) -> None:
    # A domain that lacks a node is not priced, so that the job waits.
    keys = _keys(spare_nodes="auto", without_spare="auto")
    keys["cluster"]["pools"] = [POOL | {"device": "gb200", "scale_up_domain": 4}]
    made = plan_keys(keys, tmp_path)
    choice = _choice(made)
    assert {one.nodes for one in choice.compared} <= {4, 2}
    assert choice.is_complete
    assert not any("no time" in note for note in run_notes(_run(made)))
    ratio = choice.chosen.effective_time_ratio
    assert ratio == pytest.approx(_run(made).effective_time_ratio, rel=0.01)
    cut = choice.model_copy(update={"is_complete": False})
    cut_run = _run(made).model_copy(update={"spares": cut})
    assert any("no time to search fewer than 2" in note for note in run_notes(cut_run))


def test_equal_goodput_takes_the_fewest_nodes() -> None:
    def priced(nodes: int, spares: int, goodput: float) -> NodeRatio:
        return NodeRatio(
            nodes=nodes,
            spare_nodes=spares,
            step_time_s=1.0,
            effective_time_ratio=0.9,
            goodput_tokens_per_s=goodput,
            device_s_per_token=(nodes + spares) / goodput,
        )

    close = 100.0 * (1.0 - 0.5 * CLOSE_RATIO)
    pairs = [priced(8, 3, 100.0), priced(8, 2, close), priced(8, 1, 90.0), priced(4, 0, 60.0)]
    assert choose_numbers(pairs, "goodput") is pairs[1]
    assert choose_numbers(pairs, "cost") is pairs[3]


def test_the_folder_holds_the_spec_with_its_numbers(tmp_path: Path) -> None:
    made = plan_keys(_keys(spare_nodes="auto"), tmp_path)
    folder = tmp_path / "plan"
    write_plan(folder, made.plan, spec=made.spec, profiles=made.profiles, spec_yaml=made.spec_yaml)
    text = (folder / "used" / "spec.yaml").read_bytes()
    assert hashlib.sha256(text).hexdigest() == made.plan.provenance.spec_sha256
    choice = _choice(made)
    assert yaml.safe_load(text)["goal"]["reliability"]["spare_nodes"] == choice.chosen.spare_nodes
    assert _choice(Planned(plan=read_plan(folder), spec=made.spec, profiles={})) == choice
    job = (folder / "launch" / "slurm" / "job.sbatch").read_text()
    assert f"Spare nodes of the allocation: {choice.chosen.spare_nodes};" in job
    printed = unwrapped(plan_text(made.plan, folder=folder))
    assert f"{choice.chosen.nodes} of {POOL['nodes']} train" in printed
    (note,) = run_notes(_run(made))
    assert f"the best of {choice.num_priced} pair" in note
    result = CliRunner().invoke(app, ["explain", str(folder), "--what-if", "nodes=x2"])
    assert result.exit_code == 0, result.output


def test_numbers_that_cannot_be_chosen_are_refused_in_a_line(
    tmp_path: Path, failures: Failures
) -> None:
    two = _keys(spare_nodes="auto")
    two["cluster"] = {
        "pools": [dict(POOL), POOL | {"name": "b"}],
        "links": [{"between": ["a", "b"], "bandwidth": "50GB/s", "latency": "10us"}],
    }
    linked = _keys(spare_nodes="auto")
    linked["cluster"]["pools"][0]["link_matrix"] = "links.csv"
    names = ",".join(f"n{index}" for index in range(POOL["nodes"]))
    rows = (f"n{index}" + ",5e10" * POOL["nodes"] for index in range(POOL["nodes"]))
    (tmp_path / "links.csv").write_text("\n".join([f"bytes_per_s,{names}", *rows]) + "\n")
    without_repair = _keys(spare_nodes="auto")
    del without_repair["goal"]["reliability"]["repair"]
    for keys, words in (
        (two, "auto chooses for one pool"),
        (linked, "link_matrix"),
        (without_repair, "auto needs repair"),
        (_keys(spare_nodes=1, objective="cost"), "needs spare_nodes: auto"),
        (_keys(spare_nodes="some"), "spare_nodes"),
    ):
        with failures.of(words), refused(SpecError, match=words):
            plan_keys(keys, tmp_path)
