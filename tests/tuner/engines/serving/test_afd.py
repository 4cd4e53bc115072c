"""Attention and FFN servers: their flags, where their ranks meet, and what launchers ask for."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.rows import each_row
from tests.tuner.engines.serving.testing import AFD_ENGINE, attention_expert, sample_serving
from tests.tuner.engines.testing import assert_golden, directives_of, texts_of, write_emitted
from tuner.config.serve import ServeDecision
from tuner.engines.serve_writers import emit_all_serving, emit_serving
from tuner.engines.vllm_afd.capabilities import AFD_PLUGIN, VLLM_0_30_AFD
from tuner.errors import UnknownTargetError
from tuner.plans.serve import VerifiedServing
from tuner.spec.model import ModelSpec

GOLDEN = Path(__file__).parent / "golden" / "vllm-afd"
KEYS = {"role", "connector", "host", "port", "num_attention_ranks", "num_ffn_ranks"}
"""Of what the plugin's configuration knows, those that are not its defaults (config.py)."""
HALVES = {"two_batch_overlap": True}
WIDE = attention_expert(
    attention={"devices": 16, "attention_dp": 16},
    expert={"devices": 8, "attention_dp": 8, "ep": 8},
)
"""Cells over three machines."""


def _verified(
    model: ModelSpec, decision: ServeDecision, *, emit: tuple[str, ...] = ("vllm",)
) -> VerifiedServing:
    return sample_serving(model, decision, engine="vllm", goal=AFD_ENGINE, emit=emit)


def _written(
    model: ModelSpec, decision: ServeDecision, launch: Path, *, emit: tuple[str, ...]
) -> None:
    write_emitted(launch, emit_all_serving(_verified(model, decision, emit=emit)))


def _after(argv: list[str], option: str) -> str:
    return argv[argv.index(option) + 1]


def _afd(call: dict[str, Any]) -> dict[str, Any]:
    found = json.loads(_after(call["argv"], "--additional-config"))
    assert set(found) == {"afd"}
    assert set(found["afd"]) == KEYS
    return dict(found["afd"])


def _devices(call: dict[str, Any]) -> int:
    names = ("--tensor-parallel-size", "--data-parallel-size")
    sizes = [int(_after(call["argv"], name)) for name in names if name in call["argv"]]
    return sizes[0] * (sizes[1] if len(sizes) > 1 else 1)


def _cells(calls: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, int]]:
    """Return, by the address at which ranks meet, the devices of each role that say it."""
    found: dict[tuple[str, str], dict[str, int]] = {}
    for call in calls:
        if "--additional-config" in call["argv"]:
            afd = _afd(call)
            found.setdefault((afd["host"], afd["port"]), {})[afd["role"]] = _devices(call)
            counts = {"attention": afd["num_attention_ranks"], "ffn": afd["num_ffn_ranks"]}
            assert _devices(call) == counts[afd["role"]]
    return found


def test_emitted_scripts_equal_the_golden_ones(deepseek: ModelSpec) -> None:
    files = texts_of(emit_serving("vllm", _verified(deepseek, attention_expert())))
    for name in ("attention.sh", "expert.sh", "cell.sh", "router.sh"):
        assert_golden(files[name], GOLDEN / name)
        assert "# EXPERIMENTAL: " in files[name]
    assert AFD_PLUGIN.commit in files["cell.sh"]


def test_both_servers_say_the_same_cell_and_only_attention_gets_caches(
    deepseek: ModelSpec, launch: Path, programs: Any
) -> None:
    decision = attention_expert(attention=HALVES, expert=HALVES)
    _written(deepseek, decision, launch, emit=("vllm",))
    calls = {}
    for name in ("prefill", "attention", "expert"):
        ports = {"AFD_PORT": "6000"} if name != "prefill" else {}
        done = programs.run(str(launch / f"vllm/{name}.sh"), cwd=launch, AFD_HOST="first", **ports)
        assert done.code == 0, done.stderr
        (calls[name],) = programs.calls()
    assert _cells(list(calls.values())) == {("first", "6000"): {"attention": 4, "ffn": 2}}
    for name in ("attention", "expert"):
        argv = calls[name]["argv"]
        graphs = json.loads(_after(argv, "--compilation-config"))
        assert graphs == {"cudagraph_mode": "FULL_DECODE_ONLY"}
        assert "--enable-dbo" in argv
        assert "--enable-expert-parallel" in argv
        assert _after(argv, "--all2all-backend") == "allgather_reducescatter"
        assert _after(argv, "--max-num-seqs") == "64"
    takes = {name: "--kv-transfer-config" in call["argv"] for name, call in calls.items()}
    assert takes == {"prefill": True, "attention": True, "expert": False}
    assert "kv_consumer" in _after(calls["attention"]["argv"], "--kv-transfer-config")
    for call in calls.values():
        assert call["environment"]["VLLM_USE_V2_MODEL_RUNNER"] == "0"
        assert {word for word in call["argv"] if word.startswith("--")} <= VLLM_0_30_AFD.options
        assert {name for name in call["environment"] if name.startswith("VLLM")} <= (
            VLLM_0_30_AFD.environment
        )


def test_an_attention_server_must_know_its_ffn_server(
    deepseek: ModelSpec, launch: Path, programs: Any
) -> None:
    _written(deepseek, attention_expert(), launch, emit=("vllm",))
    done = programs.run(str(launch / "vllm/attention.sh"), cwd=launch)
    assert done.code != 0
    assert "set AFD_HOST to the first machine of its FFN server" in done.stderr
    few = programs.run(str(launch / "vllm/cell.sh"), cwd=launch, CUDA_VISIBLE_DEVICES="0,1")
    assert few.code == 2
    assert "has 2 devices, the AFD unit takes 6" in few.stderr


def test_the_local_launcher_gives_every_device_to_one_server(
    deepseek: ModelSpec, launch: Path, programs: Any
) -> None:
    decision = attention_expert()
    _written(deepseek, decision, launch, emit=("local",))
    done = programs.run(
        str(launch / "local/local.sh"),
        cwd=launch,
        servers=7,
        AVAILABLE=str(decision.num_devices),
    )
    assert done.code == 0, done.stderr
    calls = programs.calls()
    seen = [
        device
        for call in calls
        for device in call["environment"]["CUDA_VISIBLE_DEVICES"].split(",")
    ]
    assert sorted(map(int, seen)) == list(range(decision.num_devices))
    found = _cells(calls)
    assert list(found.values()) == [{"attention": 4, "ffn": 2}] * 2
    assert {host for host, _ in found} == {"127.0.0.1"}
    (router,) = programs.calls("router.json")
    assert router["argv"].count("--decode") == 2
    assert router["argv"].count("--prefill") == 3


@pytest.mark.parametrize(
    ("decision", "has_whole_cells"), [(attention_expert(), True), (WIDE, False)]
)
def test_a_slurm_job_joins_the_servers_of_each_cell(
    decision: ServeDecision,
    has_whole_cells: bool,
    deepseek: ModelSpec,
    launch: Path,
    programs: Any,
) -> None:
    _written(deepseek, decision, launch, emit=("slurm",))
    components = [
        directives_of(part)
        for part in (launch / "slurm/job.sbatch").read_text().split("#SBATCH hetjob\n")
    ]
    asked = sum(
        int(one["ntasks"]) * int(one["gpus-per-task"])
        if "gpus-per-task" in one
        else int(one["nodes"]) * int(one["gpus-per-node"])
        for one in components
    )
    assert asked == decision.num_devices
    assert len(components) == (2 if has_whole_cells else 3)
    # Three prefill instances; two cells, of two processes each, or of two machines and one.
    done = programs.run(
        "job.sbatch",
        cwd=launch / "slurm",
        servers=7 if has_whole_cells else 9,
        SLURM_JOB_ID="7",
        CUDA_VISIBLE_DEVICES="0,1,2,3,4,5",
        **{f"SLURM_JOB_NODELIST_HET_GROUP_{at}": "n0,n1,n2,n3" for at in range(3)},
    )
    assert done.code == 0, done.stderr
    found = _cells(programs.calls())
    roles = {"attention": 4, "ffn": 2} if has_whole_cells else {"attention": 16, "ffn": 8}
    assert list(found.values()) == [roles] * 2
    (router,) = programs.calls("router.json")
    assert router["argv"].count("--decode") == 2


@each_row("target", ("kubernetes", "dynamo"))
def test_other_launchers_say_that_they_start_no_cells(deepseek: ModelSpec, target: str) -> None:
    with pytest.raises(UnknownTargetError, match=r"emit: .* emit local, slurm, vllm, or plan"):
        emit_serving(target, _verified(deepseek, attention_expert()))
