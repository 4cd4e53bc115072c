"""Where a deployment answers that a script of this machine starts."""

from pathlib import Path

from tests.tuner.engines.serving.testing import (
    AFD_ENGINE,
    aggregated,
    attention_expert,
    disaggregated,
    islands,
    sample_serving,
)
from tests.tuner.models import example_model
from tuner.config.serve import ServeDecision
from tuner.engines.launchers.pods import POOL_LABEL
from tuner.goals.serve_trial import Reached, prepared_launch, write_launch_files


def _asked(decision: ServeDecision, folder: Path) -> tuple[str, ...]:
    verified = sample_serving(
        example_model("deepseek-v3"),
        decision,
        engine="vllm",
        emit=("local",),
        goal=AFD_ENGINE,
    )
    launch = prepared_launch(verified.plan, decision, verified.predicted, 0, folder, Reached())
    return launch.addresses


def test_every_server_is_waited_for_that_takes_requests(tmp_path: Path) -> None:
    ports = [30000, 30200, 30400, 30600, 8000]
    wanted = tuple(f"http://127.0.0.1:{port}/health" for port in ports)
    assert _asked(disaggregated(), tmp_path) == wanted
    # Three prefill and two attention servers; FFN servers, on the two ports behind, take none.
    ports[4:4] = [30800]
    wanted = tuple(f"http://127.0.0.1:{port}/health" for port in ports)
    assert _asked(attention_expert(), tmp_path) == wanted


def test_a_deployment_on_a_pool_with_its_own_engine_is_launched_as_that_engines(
    tmp_path: Path,
) -> None:
    verified = sample_serving(
        example_model("mixtral-8x7b"),
        islands(pools=("h100", "h200")),
        engine="vllm",
        emit=("vllm", "kubernetes"),
        devices={"h100": "h100-sxm", "h200": "h200-sxm"},
        goal={"engines": {"h200": {"name": "sglang"}}},
    )
    for number, (pool, engine) in enumerate((("h100", "vllm"), ("h200", "sglang"))):
        reached = Reached(url="http://127.0.0.1:8000")
        launch = prepared_launch(
            verified.plan, aggregated(pool=pool), verified.predicted, number, tmp_path, reached
        )
        assert Path(launch.values["launch"]).name == engine
        launch.folder.mkdir()
        write_launch_files(launch, None)
        assert (launch.folder / "launch" / engine / "aggregated.sh").is_file()
        # Trials do not take the machines of the other pool.
        deployment = (launch.folder / "launch" / "kubernetes" / "deployment.yaml").read_text()
        assert f"{POOL_LABEL}: {pool}" in deployment
