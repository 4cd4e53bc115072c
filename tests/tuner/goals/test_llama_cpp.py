"""Estimates and plans of llama.cpp, from spec to script."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from tests import gguf_files
from tests.expect import present, refused
from tests.rows import each_row
from tuner.errors import PlanUnreadableError, SpecError
from tuner.goals.llama_cpp import LlamaEstimate, estimate, plan
from tuner.goals.registry import goal_of_folder

Keys = Mapping[str, object]
LAUNCH = "llama-server -m a.gguf -c 4096 -np 1 -ngl 99 -t 16"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sparse file of the sizes of Qwen3-30B-A3B, of 17 GiB."""
    return gguf_files.moe(
        tmp_path_factory.mktemp("model") / "large.gguf",
        layers=48,
        hidden=2048,
        heads=32,
        experts=128,
        used=8,
        width=768,
    )


def spec(folder: Path, model: Path, *, device: str = "rtx-3090", **keys: Keys) -> Path:
    """Write a spec; `host`, `pool` and `goal` are added to what is usual."""

    host = {
        "memory": "64GiB",
        "reserve": "6GiB",
        "bandwidth": "80GB/s",
        "cores": 16,
        **keys.get("host", {}),
    }
    pool = {
        "name": "desk",
        "device": device,
        "devices_per_node": 1,
        "host": host,
        **keys.get("pool", {}),
    }
    goal = {
        "kind": "serve",
        "engine": {"name": "llama.cpp"},
        "traffic": {"input_tokens": 3000, "output_tokens": 500},
        **keys.get("goal", {}),
    }
    path = folder / "spec.yaml"
    content = {
        "schema_version": 1,
        "model": str(model),
        "cluster": {"pools": [pool]},
        "goal": goal,
    }
    path.write_text(yaml.safe_dump(content))
    return path


SMALL = {"memory_per_device": "12GiB"}


def test_a_card_that_is_too_small_gets_experts_on_the_host(tmp_path: Path, model: Path) -> None:
    made = estimate(spec(tmp_path, model, pool=SMALL), launch=f"{LAUNCH} -ncmoe 0")
    assert "device memory" in made.predicted.misfit
    change = present(made.smallest_change)
    assert change.words.startswith("-ncmoe 0 -> ")
    assert not change.predicted.misfit


def test_a_plan_is_the_fewest_host_layers_that_fit(tmp_path: Path, model: Path) -> None:
    path = spec(tmp_path, model, pool=SMALL)
    made = plan(path, out=tmp_path / "plan")
    best = present(made.decision)
    words = " ".join(best.options)
    assert "--fit off" in words
    layers = int(best.options[best.options.index("-ncmoe") + 1])
    assert 0 < layers < 48
    fewer = words.replace(f"-ncmoe {layers}", f"-ncmoe {layers - 1}")
    assert "device memory" in estimate(path, launch=f"llama-server {fewer}").predicted.misfit
    again = estimate(path, launch=str(tmp_path / "plan" / "llama-server.sh"))
    assert again.predicted == best
    assert len(made.alternatives) == 3
    more = {gain.memory: gain.request_ratio for gain in made.more}
    assert more["device"] < 1 <= more["host"]


def test_other_commands_say_that_they_do_not_read_its_plan(tmp_path: Path, model: Path) -> None:
    plan(spec(tmp_path, model), out=tmp_path / "plan")
    with refused(PlanUnreadableError, "goal.kind 'llama.cpp' is not one of"):
        goal_of_folder(tmp_path / "plan")


def test_a_plan_that_fits_nothing_leaves_no_script(tmp_path: Path, model: Path) -> None:
    out = tmp_path / "plan"
    assert plan(spec(tmp_path, model), out=out).decision is not None
    assert (out / "llama-server.sh").is_file()
    small = spec(tmp_path, model, pool={"memory_per_device": "10MiB"})
    assert plan(small, out=out).decision is None
    assert not (out / "llama-server.sh").exists()


def test_more_experts_on_the_device_decode_faster(tmp_path: Path, model: Path) -> None:
    path = spec(tmp_path, model)
    rates = [
        estimate(path, launch=f"{LAUNCH} -ncmoe {layers}").predicted.decode_tokens_per_s
        for layers in (0, 12, 24, 48)
    ]
    assert rates == sorted(rates, reverse=True)


def test_a_batch_reads_the_union_of_its_experts(tmp_path: Path, model: Path) -> None:
    def step_s(requests: int) -> float:
        traffic = {"input_tokens": 300, "output_tokens": 50, "concurrency": requests}
        path = spec(tmp_path, model, goal={"traffic": traffic})
        launch = f"llama-server -c 32768 -np {requests} -t 16 -cmoe"
        return estimate(path, launch=launch).predicted.host_s

    # 128 * (1 - (1 - 8/128)^4) = 29.1 experts are read, of 8 by one request.
    assert step_s(4) / step_s(1) == pytest.approx(29.12 / 8, rel=1e-3)


def test_a_measured_read_rate_counts(tmp_path: Path, model: Path) -> None:
    rated = estimate(spec(tmp_path, model), launch=f"{LAUNCH} -cmoe").predicted
    path = spec(tmp_path, model, host={"read_rate": "20GB/s"})
    measured = estimate(path, launch=f"{LAUNCH} -cmoe").predicted
    assert measured.host_s == pytest.approx(rated.host_s * 80 * 0.48 / 20)


def test_a_host_below_the_mapped_file_is_refused(tmp_path: Path, model: Path) -> None:
    path = spec(tmp_path, model, host={"memory": "20GiB"})
    made = estimate(path, launch=f"{LAUNCH} -ncmoe 24")
    assert "host memory" in made.predicted.misfit
    # Copied instead of mapped, what is on the device needs no page of the host.
    assert present(made.smallest_change).words.startswith("-lm mmap -> none")


def test_ollama_places_whole_layers(tmp_path: Path, model: Path) -> None:
    made: LlamaEstimate = estimate(spec(tmp_path, model, pool=SMALL), launch="ollama serve")
    assert not made.predicted.misfit
    layers = int(made.predicted.options[made.predicted.options.index("-ngl") + 1])
    assert 0 < layers < 49


def test_one_memory_holds_all(tmp_path: Path, model: Path) -> None:
    host = {"memory": "121GiB", "bandwidth": "273GB/s", "cores": 20}
    made = plan(spec(tmp_path, model, device="gb10", host=host), out=tmp_path / "plan")
    best = present(made.decision)
    assert best.options[best.options.index("-ncmoe") + 1] == "0"
    assert best.host_s == 0


@each_row(
    "keys, words",
    [
        ({"host": {"cores": None}}, "state memory and cores"),
        ({"host": {"bandwidth": None}}, "bandwidth"),
        ({"pool": {"devices_per_node": 2}}, "one accelerator"),
        ({"pool": {"nodes": 2}}, "one machine"),
        ({"goal": {"engine": {"name": "llama.cpp", "version": "b1"}}}, "b11739 is described"),
        ({"goal": {"max_model_len": 100}}, "holds no request"),
        ({"goal": {"max_model_len": 9_000_000}}, "the model has 131,072"),
    ],
)
def test_refuses_a_spec(tmp_path: Path, model: Path, keys: dict[str, Keys], words: str) -> None:
    with refused(SpecError, "spec.yaml", words):
        plan(spec(tmp_path, model, device="rtx-3090", **keys), out=tmp_path / "plan")


@each_row(
    "launch, words",
    [
        (f"{LAUNCH} -ot exps=CUDA7", "devices are CPU, CUDA0"),
        ("llama-server -t 17 -cmoe", "physical cores"),
        ("llama-server -fa maybe", "on, off or auto"),
    ],
)
def test_refuses_a_launch(tmp_path: Path, model: Path, launch: str, words: str) -> None:
    with refused(SpecError, words):
        estimate(spec(tmp_path, model), launch=launch)


def test_refuses_experts_that_no_token_visits(tmp_path: Path) -> None:
    path = gguf_files.moe(tmp_path / "damaged.gguf", used=0)
    with refused(SpecError, "expert_used_count 0 of expert_count", "the file is damaged"):
        estimate(spec(tmp_path, path), launch=LAUNCH)


def test_refuses_expert_settings_of_a_dense_model(tmp_path: Path) -> None:
    dense = gguf_files.dense(tmp_path / "dense.gguf")
    with refused(SpecError, "dense model"):
        estimate(spec(tmp_path, dense), launch=f"{LAUNCH} -ncmoe 3")
