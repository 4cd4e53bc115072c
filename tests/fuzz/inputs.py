"""Every kind of input that a command reads: a valid one, and the command that reads it.

`build` writes the valid inputs once, a folder for each kind; a mutation corrupts one file of a
copy. In arguments `{in}` is the copy, `{out}` a writable place, `{text}` the corrupted argument
where the kind is an argument.
"""

import contextlib
import io
import json
import shutil
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import yaml

ROOT: Final = Path(__file__).parents[2]
EXAMPLES: Final = ROOT / "examples"
LAUNCHES: Final = ROOT / "tests" / "tuner" / "estimate" / "launches"

Arguments = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of input."""

    name: str
    folder: str
    """Its sound files, below the base."""
    files: tuple[str, ...] = ()
    """Which of them may be spoilt; patterns."""
    commands: tuple[Arguments, ...] = ()
    texts: tuple[str, ...] = ()
    """Sound arguments, where an argument is spoilt."""
    writes_input: bool = False
    """The command's output lies in the folder that it reads."""


TRAIN: Final[dict[str, Any]] = {
    "schema_version": 1,
    "model": "config.json",
    "cluster": {
        "pools": [
            {
                "name": "here",
                "device": "h100-sxm",
                "nodes": 1,
                "devices_per_node": 2,
                "memory_per_device": "60GiB",
                "price_per_device_hour": 2.5,
            }
        ],
        "links": [],
    },
    "goal": {
        "kind": "train",
        "sequence_length": 256,
        "global_batch_size": 8,
        "precision": "bf16",
        "routing": {"path": "routing.json", "phase": "steady"},
    },
    "search": {"micro_batch_size": [1, 2]},
    "emit": ["reference", "megatron-lm", "slurm", "torchtitan", "deepspeed"],
}
SERVE: Final[dict[str, Any]] = {
    "schema_version": 1,
    "model": "config.json",
    "cluster": {
        "pools": [
            {
                "name": "h100",
                "device": "h100-sxm",
                "nodes": 1,
                "devices_per_node": 2,
                "price_per_device_hour": 3.0,
            }
        ]
    },
    "goal": {
        "kind": "serve",
        "engine": {"name": "vllm"},
        "traffic": {
            "rate": "5/s",
            "arrival": {"kind": "gamma", "cv": 1.5},
            "input_tokens": {"kind": "lognormal", "mean": 200, "cv": 1.0, "most": 1600},
            "output_tokens": {"kind": "lognormal", "mean": 40, "cv": 1.0, "most": 400},
        },
        "slo": {"ttft": {"p90": "1s"}, "tpot": {"p90": "40ms"}},
        "objective": "cost",
    },
    "emit": ["vllm", "slurm"],
}
PLACE: Final[dict[str, Any]] = {
    "schema_version": 1,
    "goal": {
        "kind": "place",
        "objective": "balance",
        "ranks": 4,
        "ranks_per_node": 2,
        "slots_per_rank": 3,
        "current": "current.json",
        "max_moved_experts": 4,
        "workloads": [{"name": "python", "path": "routing.json"}],
    },
    "emit": ["trtllm", "eplb"],
}
LAUNCHED: Final = {
    "mixtral.sh": ("mixtral-8x7b", 8),
    "llama3-70b.toml": ("llama-3.1-70b", 8),
    "deepseek-16b.toml": ("deepseek-v2-lite", 2),
    "zero3.json": ("llama-3.1-8b", 8),
    "llama.yaml": ("llama-3.1-405b", 128),
    "deepseek-v3.sh": ("deepseek-v3", 128),
}
"""Launch files by their model and machines of 8."""
DRAFT: Final = ("--model", "{in}/config.json", "--device", "h100-sxm", "--devices", "2")
LIMIT: Final = ("--time-limit", "1s")
SERVER: Final = "python -m sglang.launch_server --model-path m --tp 2 --dp 2 --enable-dp-attention"
VLLM: Final = "vllm serve m --tensor-parallel-size 2 --max-num-seqs 64 --gpu-memory-utilization 0.9"
MEGATRON: Final = (
    "torchrun --nnodes 1 --nproc-per-node 2 pretrain_gpt.py --micro-batch-size 1 --bf16"
    " --pipeline-model-parallel-size 1 --expert-model-parallel-size 2"
    " --use-distributed-optimizer --global-batch-size 8"
)
STEP_LINE: Final = r"iter (?P<step>\d+) took (?P<step_s>[0-9.]+) s"


def kinds() -> tuple[Kind, ...]:
    """Return every kind; the order determines the mutation of a number."""
    plan = ("plan", "{in}/spec.yaml", "-o", "{out}", *LIMIT)
    explain = (("explain", "{in}", "--what-if", "none"), ("report", "{in}", "--no-what-if"))
    of_launch = tuple(
        Kind(
            name=f"launch {file}",
            folder="launches",
            files=(file,),
            commands=(("estimate", f"{{in}}/{file}.yaml", "--launch", f"{{in}}/{file}"),),
        )
        for file in sorted(LAUNCHED)
    )
    recorded = tuple(
        Kind(
            name=f"recording {name}",
            folder=f"recording-{name}",
            files=("*",),
            commands=(("profile", "import", kind, f"{{in}}{place}", "-o", "{out}"),),
        )
        for name, (kind, place) in RECORDINGS.items()
    )
    planned = tuple(
        Kind(
            name=f"plan.json {goal}",
            folder=f"plan-{goal}",
            files=("plan.json",),
            commands=(*explain, *more),
            writes_input=True,
        )
        for goal, more in {
            "train": (VERIFY,),
            "serve": (),
            "place": (),
        }.items()
    )
    traced = tuple(
        Kind(
            name=f"trace {name}",
            folder="trace",
            files=(f"{name}.{suffix}",),
            commands=(("plan", f"{{in}}/{name}.yaml", "-o", "{out}", *LIMIT),),
        )
        for name, suffix in TRACES.items()
    )
    compared = tuple(
        Kind(
            name=f"compare {goal}",
            folder=f"compared-{goal}",
            files=("b/plan.json",),
            commands=(("compare", "{in}/a", "{in}/b"), ("compare", "{in}/b", "{in}/a")),
        )
        for goal in ("train", "serve", "place")
    )
    served = tuple(
        Kind(
            name=f"served {name}",
            folder="plan-trtllm",
            files=(f"launch/{file}", *more),
            commands=(("estimate", "{in}/spec.yaml", "--launch", f"{{in}}/launch/{file}"),),
        )
        for name, file, more in (
            ("by options", "trtllm/aggregated.sh", ("launch/trtllm/aggregated.yaml",)),
            ("by kubernetes", "kubernetes/deployment.yaml", ()),
            ("by dynamo", "dynamo/graph.yaml", ()),
        )
    )
    logged = tuple(
        Kind(
            name=f"failures {file}",
            folder="failures",
            files=(file,),
            commands=(("plan", f"{{in}}/{file}.yaml", "-o", "{out}", *LIMIT),),
        )
        for file in FAILURES
    )
    return (
        Kind(name="spec train", folder="train", files=("spec.yaml",), commands=(plan,)),
        Kind(name="spec serve", folder="serve", files=("spec.yaml",), commands=(plan,)),
        Kind(name="spec place", folder="place", files=("spec.yaml",), commands=(plan,)),
        Kind(
            name="config.json",
            folder="train",
            files=("config.json",),
            commands=(
                ("estimate", "{in}/spec.yaml", "--launch", MEGATRON),
                plan,
                ("init", "-y", "-o", "{out}/s.yaml", *DRAFT),
            ),
        ),
        *planned,
        Kind(
            name="verified.json",
            folder="verified",
            files=("verified.json",),
            commands=explain,
            writes_input=True,
        ),
        Kind(
            name="trial",
            folder="verified",
            files=("trials/0*.json", "trials/study.db"),
            commands=((*VERIFY, "--resume"), ("report", "{in}", "--no-what-if")),
            writes_input=True,
        ),
        Kind(
            name="used",
            folder="plan-train",
            files=("used/*", "launch/*/*"),
            commands=(*explain, VERIFY),
            writes_input=True,
        ),
        Kind(
            name="profile",
            folder="profile",
            files=("*.parquet", "profile.json"),
            commands=(
                ("profile", "show", "{in}"),
                ("profile", "show", "{in}", "--links"),
                ("profile", "diff", "{in}", "{in}"),
            ),
        ),
        Kind(
            name="profile in a plan",
            folder="measured",
            files=("profile/*.parquet", "profile/profile.json", "routing.json"),
            commands=(plan,),
        ),
        *recorded,
        Kind(
            name="recording stored",
            folder="recording",
            files=("*",),
            commands=(
                ("profile", "show", "{in}"),
                ("profile", "import", "routing", "{in}", "-o", "{out}"),
            ),
        ),
        Kind(
            name="routing record",
            folder="train",
            files=("routing.json",),
            commands=(
                plan,
                ("profile", "import", "routing-json", "{in}/routing.json", "-o", "{out}"),
            ),
        ),
        Kind(
            name="runs",
            folder="tables",
            files=("runs.csv",),
            commands=(
                ("backtest", "{in}/runs.csv"),
                ("calibrate", "datasheets", "{in}/runs.csv", "-o", "{out}"),
            ),
        ),
        Kind(
            name="serving runs",
            folder="tables",
            files=("serving.csv",),
            commands=(("backtest", "{in}/serving.csv"),),
        ),
        *traced,
        *logged,
        Kind(name="link matrix", folder="links", files=("links.csv",), commands=(plan,)),
        Kind(
            name="nccl-tests",
            folder="tables",
            files=("nccl.txt",),
            commands=(("profile", "import", "nccl-tests", "{in}/nccl.txt", "-o", "{out}"),),
        ),
        Kind(
            name="aiconfigurator",
            folder="systems",
            files=("tiny_sxm.yaml", "data/tiny_sxm/*/*/*"),
            commands=(("profile", "import", "aiconfigurator", "{in}", "-o", "{out}"),),
        ),
        Kind(
            name="aiconfigurator text",
            folder="systems-text",
            files=("tiny_sxm.yaml", "data/tiny_sxm/*/*/*"),
            commands=(("profile", "import", "aiconfigurator", "{in}", "-o", "{out}"),),
        ),
        *of_launch,
        *served,
        *compared,
        Kind(
            name="checks",
            folder="checks",
            files=("scenarios.json", "*/spec.yaml", "*/plan.json", "*/baseline.json"),
            commands=(("check", "{in}", "-j", "1", "--time-limit", "2s"),),
        ),
        Kind(name="current placement", folder="place", files=("current.json",), commands=(plan,)),
        Kind(
            name="placement yaml",
            folder="place",
            files=("current.yaml",),
            commands=(("plan", "{in}/of-yaml.yaml", "-o", "{out}", *LIMIT),),
        ),
        Kind(
            name="placement npy",
            folder="place",
            files=("current.npy",),
            commands=(("plan", "{in}/of-npy.yaml", "-o", "{out}", *LIMIT),),
        ),
        Kind(
            name="engine log",
            folder="plan-train",
            files=("log.txt",),
            commands=tuple(
                (*VERIFY[:-1], PRINTED, "--metrics", metrics)
                for metrics in (
                    "megatron",
                    "torchtitan",
                    "deepspeed",
                    "jsonl",
                    f"regex:{STEP_LINE}",
                )
            ),
            writes_input=True,
        ),
        Kind(
            name="a launch command",
            folder="train",
            texts=(MEGATRON,),
            commands=(("estimate", "{in}/spec.yaml", "--launch", "{text}"),),
        ),
        Kind(
            name="a server command",
            folder="serve",
            texts=(SERVER, VLLM),
            commands=(("estimate", "{in}/spec.yaml", "--launch", "{text}"),),
        ),
        Kind(
            name="what-if",
            folder="plan-train",
            texts=("nodes=+1,memory=-20%,bandwidth=x2,batch=512", "memory=+1GiB", "none"),
            commands=(("explain", "{in}", "--what-if", "{text}", *LIMIT),),
        ),
        Kind(
            name="regex",
            folder="plan-train",
            texts=(
                STEP_LINE,
                r"(?P<step_s>(a|b)*c)",
                r"(?P<step_s>a{1,99})",
                r"(?i)(?P<step_s>\d+)",
            ),
            commands=((*VERIFY, "--metrics", "regex:{text}"),),
            writes_input=True,
        ),
        Kind(
            name="storage",
            folder="plan-train",
            texts=("postgresql://u:secret@127.0.0.1:1/db?sslmode=disable", "postgres://[::1]:1/x"),
            commands=((*VERIFY, "--storage", "{text}"),),
            writes_input=True,
        ),
        Kind(
            name="options",
            folder="train",
            texts=("1s", "4", "2GiB", "h100-sxm", "3-60", "a,b", "config.json"),
            commands=tuple(_options()),
        ),
        Kind(
            name="study",
            folder="study",
            files=("trials/study.db",),
            commands=(_VERIFY_ON, _VERIFY_ON, _VERIFY_ON, explain[0]),
            writes_input=True,
        ),
    )


VERIFY: Final = (
    "verify",
    "{in}",
    "--trials",
    "2",
    "--steps",
    "3",
    "--launcher",
    "command",
    "--command",
    "cat {plan}/steps.jsonl",
)
_VERIFY_ON: Final = ("verify", "{in}", "--trials", "4", "--resume", *VERIFY[4:])
PRINTED: Final = """sh -c 'test -f "$0" && head -c 4000000 "$0"' {plan}/log.txt"""
"""The user's own command must not wait for a pipe."""
RECORDINGS: Final = {
    "plain": ("routing-json", "/a.json"),
    "sglang": ("sglang", ""),
    "sglang-json": ("sglang", "/a.json"),
    "trtllm": ("trtllm", ""),
    "megatron": ("megatron-trace", ""),
    "ascend": ("vllm-ascend", ""),
    "npy": ("eplb", "/a.npy"),
    "pt": ("eplb", "/a.pt"),
}
"""Their formats, and the files that are read."""
FAILURES: Final[dict[str, str]] = {
    "table.csv": "time,component,count\n" + "".join(f"{at}00,node,2\n" for at in range(1, 9)),
    "sacct.txt": "JobID|State|Start|End|NNodes|AllocTRES\n"
    + "".join(
        f"{at}|NODE_FAIL|2026-03-0{at}T00:00:00|2026-03-0{at}T09:00:00|2|gres/gpu=4\n"
        for at in range(1, 9)
    ),
}
TRACES: Final = {"azure": "csv", "burst": "csv", "mooncake": "jsonl", "hashed": "jsonl"}
"""By the format, what its file's name ends with."""


def _options() -> Sequence[Arguments]:
    plan = ("plan", "{in}/spec.yaml", "-o", "{out}", *LIMIT)
    drafted = ("plan", "--model", "{in}/config.json", "-o", "{out}", *LIMIT)
    return (
        *(
            (*plan, option, "{text}")
            for option in ("--time-limit", "--top", "--solver", "--profile")
        ),
        *(
            (*drafted, "--device", "h100-sxm", option, "{text}")
            for option in ("--device", "--devices", "--sequence-length", "--batch", "--precision")
        ),
        *(
            (
                *drafted,
                "--goal",
                "serve",
                "--device",
                "h100-sxm",
                "--devices",
                "2",
                option,
                "{text}",
            )
            for option in (
                "--engine",
                "--rate",
                "--concurrency",
                "--input-tokens",
                "--ttft",
                "--emit",
            )
        ),
        ("plan", "--goal", "place", "--ranks", "4", "--workload", "{text}", "-o", "{out}"),
        ("plan", "{text}", "-o", "{out}"),
        ("profile", "show", "{text}"),
        ("profile", "import", "{text}", "{in}", "-o", "{out}"),
        (
            "profile",
            "import",
            "routing",
            "{in}/routing.json",
            "-o",
            "{out}",
            "--layer-ids",
            "{text}",
        ),
        (
            "profile",
            "import",
            "routing",
            "{in}/routing.json",
            "-o",
            "{out}",
            "--workload",
            "{text}",
        ),
        ("explain", "{text}"),
        ("report", "{text}"),
        ("backtest", "{text}"),
        ("schema", "{text}"),
        ("check", "{text}"),
        ("check", "{in}", "--against", "{text}"),
        ("check", "{in}", "--only", "{text}"),
        ("verify", "{text}"),
        ("init", "-y", "-o", "{out}/s.yaml", "--model", "{in}/config.json", "--device", "{text}"),
        ("{text}",),
    )


def build(
    base: Path,
    *,
    recordings: Iterable[str] = RECORDINGS,
    goals: Iterable[str] = ("train", "serve", "place", "trtllm"),
) -> None:
    """Write the valid inputs of every kind, the plans of some goals (train is one) by planning."""
    _specs(base)
    for name in recordings:
        _recording(base / f"recording-{name}", name)
    _tables(base)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        _planned(base, goals)


def _specs(base: Path) -> None:
    model = EXAMPLES / "models" / "tiny-moe" / "config.json"
    routing = EXAMPLES / "routing" / "tiny-moe-python.json"
    for name, spec in {"train": TRAIN, "serve": SERVE, "place": PLACE}.items():
        folder = base / name
        folder.mkdir(parents=True)
        shutil.copy(model, folder / "config.json")
        values = json.loads(routing.read_text())
        values["passes"] = values["passes"][:4]
        (folder / "routing.json").write_text(json.dumps(values))
        _yaml(folder / "spec.yaml", spec)
    launches = base / "launches"
    shutil.copytree(LAUNCHES, launches)
    for file, (name, nodes) in LAUNCHED.items():
        pool = {"name": "h100", "device": "h100-sxm", "nodes": nodes, "devices_per_node": 8}
        goal = {"kind": "train", "sequence_length": 4096, "global_batch_size": 256}
        path = str(EXAMPLES / "models" / name)
        spec = {"schema_version": 1, "model": path, "cluster": {"pools": [pool]}, "goal": goal}
        _yaml(launches / f"{file}.yaml", spec | {"emit": ["megatron-lm"]})
    slots = [[(slot + layer) % 8 for slot in range(12)] for layer in range(4)]
    place = base / "place"
    (place / "current.json").write_text(json.dumps({"physical_to_logical_map": slots}))
    _yaml(place / "current.yaml", {"initial_global_assignments": dict(enumerate(slots))})
    np.save(place / "current.npy", np.array(slots))
    for kind in ("yaml", "npy"):
        goal = PLACE["goal"] | {"current": f"current.{kind}"}
        _yaml(place / f"of-{kind}.yaml", PLACE | {"goal": goal})
    measured = EXAMPLES / "profiles" / "emulated-2x2"
    shutil.copytree(measured / "profile", base / "profile")
    shutil.copytree(EXAMPLES / "routing" / "python", base / "recording")
    shutil.copytree(measured, base / "measured")
    shutil.copy(base / "train" / "routing.json", base / "measured" / "routing.json")
    links = base / "links"
    shutil.copytree(EXAMPLES / "slow-link", links)
    spec = yaml.safe_load((links / "spec.yaml").read_text())
    spec["model"] = str((EXAMPLES / "slow-link" / spec["model"]).resolve())
    _yaml(links / "spec.yaml", spec)
    for name in ("place-balance", "serve-infeasible"):
        shutil.copytree(EXAMPLES / "checks" / name, base / "checks" / name)
        text = (base / "checks" / name / "spec.yaml").read_text()
        (base / "checks" / name / "spec.yaml").write_text(text.replace("../..", str(EXAMPLES)))
    names = {"schema_version": 1, "names": ["place-balance", "serve-infeasible"]}
    (base / "checks" / "scenarios.json").write_text(json.dumps(names))


def _yaml(file: Path, values: Any) -> None:
    file.write_text(yaml.safe_dump(values, sort_keys=False))


def _recording(folder: Path, name: str) -> None:
    folder.mkdir()
    rng = np.random.default_rng(5)
    counts = rng.integers(1, 99, (3, 4, 8))
    chosen = rng.integers(0, 8, (4, 5, 2))
    if name in ("sglang", "pt"):
        import torch

        if name == "pt":
            torch.save(torch.from_numpy(counts), folder / "a.pt")
            return
        record = {
            "forward_pass_id": 1,
            "rank": 0,
            "global_physical_count": torch.from_numpy(counts[0]),
            "topk_ids_of_layer": torch.from_numpy(chosen),
        }
        content = {
            "records": [record],
            "last_physical_to_logical_map": torch.arange(8).repeat(4, 1),
        }
        torch.save(content, folder / "expert_distribution_recorder_1_0.pt")
    elif name == "plain":
        values = {"num_logical_experts": 8, "layer_ids": [0, 1, 2, 3], "passes": counts.tolist()}
        (folder / "a.json").write_text(json.dumps(values))
    elif name == "sglang-json":
        (folder / "a.json").write_text(json.dumps({"logical_count": counts.tolist()}))
    elif name == "npy":
        np.save(folder / "a.npy", counts)
    elif name == "trtllm":
        (folder / "meta_info.json").write_text('{"num_experts": 8, "num_experts_per_token": 2}')
        _safetensors(folder / "rank0.safetensors", {f"1_{at}": counts[0, at] for at in range(4)})
        raw = {f"1_{at}": chosen[at] for at in range(4)}
        _safetensors(folder / "rank0_raw.safetensors", raw)
    elif name == "megatron":
        lines = (
            json.dumps({"step": 0, "layer": at, "rank": 0, "top_indices": chosen[at].tolist()})
            for at in range(4)
        )
        (folder / "router_trace_rank0.jsonl").write_text("\n".join(lines) + "\n")
    else:
        devices = [{"device_id": n, "device_expert": [2 * n, 2 * n + 1]} for n in range(4)]
        layers = [{"layer_id": n, "device_list": devices} for n in range(4)]
        (folder / "map.json").write_text(json.dumps({"moe_layer_count": 4, "layer_list": layers}))
        np.save(folder / "load.npy", counts[0].reshape(4, 4, 2))


def _safetensors(file: Path, arrays: dict[str, Any]) -> None:
    header: dict[str, Any] = {}
    data = b""
    for name, array in arrays.items():
        content = np.ascontiguousarray(array, dtype="<i8").tobytes()
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": "I64", "shape": list(array.shape), "data_offsets": offsets}
        data += content
    encoded = json.dumps(header).encode()
    file.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)


def _tables(base: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables = base / "tables"
    tables.mkdir()
    runs = (ROOT / "tests" / "tuner" / "backtest" / "runs.csv").read_text().splitlines()
    # Calibration takes a second for each row or two.
    (tables / "runs.csv").write_text("\n".join(runs[:6]) + "\n")
    header = (
        "id,silicon_data_source,backend,backend_version,model_path,system,precision,mode,isl,osl,"
        "tp_size,silicon_ttft_ms,silicon_tpot_ms"
    )
    row = (
        "{},db-dump/1; silicon_concurrency=4,vllm,0.18,Llama-3.1-8B,h200_sxm,fp8,agg,512,64,1,{},9"
    )
    rows = [row.format(name, ms) for name, ms in (("a", 50), ("b", 30))]
    (tables / "serving.csv").write_text("\n".join((header, *rows)) + "\n")
    ranks = (
        f"#  Rank {rank:2d} Group  0 Pid {900 + rank} on   host-{rank // 4} device {rank % 4:2d}"
        " [0000:00:00] NVIDIA H100 80GB HBM3"
        for rank in range(8)
    )
    (tables / "nccl.txt").write_text(
        "# nccl-tests version 2.17.6 nccl-headers=22705 nccl-library=22705\n"
        "# Collective test starting: all_reduce_perf\n# Using devices\n"
        + "\n".join(ranks)
        + "\n# size count type redop root time algbw busbw #wrong time algbw busbw #wrong\n"
        "  1024   256 float   sum   -1 20.00  0.05  0.09      0 21.00  0.05  0.09      0\n"
        "  2048   512 float   sum   -1 30.00  0.07  0.12      0 31.00  0.07  0.12    N/A\n"
    )
    trace = base / "trace"
    shutil.copytree(base / "serve", trace)
    times = [f"2023-11-16 18:{at // 60:02d}:{at % 60:02d}.0" for at in range(60)]
    azure = (f"{time},{200 + at},{20 + at % 7}" for at, time in enumerate(times))
    (trace / "azure.csv").write_text(
        "\n".join(("TIMESTAMP,ContextTokens,GeneratedTokens", *azure)) + "\n"
    )
    burst = (f"{at},ChatGPT,{200 + at},20,{220 + at},Conversation log" for at in range(60))
    (trace / "burst.csv").write_text(
        "\n".join(("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type", *burst))
        + "\n"
    )
    mooncake = (
        json.dumps({"timestamp": 1000 * at, "input_length": 200 + at, "output_length": 20})
        for at in range(60)
    )
    (trace / "mooncake.jsonl").write_text("\n".join(mooncake) + "\n")
    hashed = (
        json.dumps(
            {"timestamp": 1000 * at, "input_length": 1400, "output_length": 20}
            | {"hash_ids": [0, 1, 2 + at]}
        )
        for at in range(60)
    )
    (trace / "hashed.jsonl").write_text("\n".join(hashed) + "\n")
    for name, suffix in TRACES.items():
        traffic = {"trace": f"{name}.{suffix}"}
        _yaml(trace / f"{name}.yaml", SERVE | {"goal": SERVE["goal"] | {"traffic": traffic}})
    failures = base / "failures"
    shutil.copytree(base / "train", failures)
    for name, log_text in FAILURES.items():
        (failures / name).write_text(log_text)
        log = {"path": name} | ({} if name.startswith("sacct") else {"devices": 64})
        goal = TRAIN["goal"] | {"reliability": {"log": log, "restart": "10min"}}
        _yaml(failures / f"{name}.yaml", TRAIN | {"goal": goal})
    systems = base / "systems"
    folder = systems / "data" / "tiny_sxm" / "vllm" / "0.1"
    folder.mkdir(parents=True)
    (systems / "tiny_sxm.yaml").write_text(
        "data_dir: data/tiny_sxm\ngpu: {mem_capacity: 1000000, mem_bw: 1.0}\n"
        "node: {num_gpus_per_node: 8}\n"
    )
    gemm = [
        {"device": "NVIDIA H100 80GB HBM3", "kernel_source": "k", "gemm_dtype": "bfloat16"}
        | {"m": 2**at, "n": 128, "k": 256, "latency": 0.1 * (at + 1)}
        for at in range(6)
    ]
    pq.write_table(pa.Table.from_pylist(gemm), folder / "gemm_perf.parquet")
    text = [",".join(gemm[0]), *(",".join(map(str, each.values())) for each in gemm)]
    other = base / "systems-text"
    shutil.copytree(systems, other)
    table = other / folder.relative_to(systems) / "gemm_perf.parquet"
    table.unlink()
    table.with_suffix(".txt").write_text("\n".join(text) + "\n")


def _planned(base: Path, goals: Iterable[str]) -> None:
    from tuner.cli.app import run

    steps = "".join(f'{{"step": {at}, "step_s": 0.{at + 1}}}\n' for at in range(8))
    log = "".join(
        f" iteration {at}/ 8 | elapsed time per iteration (ms): 12{at}.5 | iter {at} took 0.5 s\n"
        f'{{"step": {at}, "step_s": 0.5}}\n'
        for at in range(8)
    )
    trtllm = SERVE | {
        "goal": SERVE["goal"] | {"engine": {"name": "trtllm"}},
        "emit": ["trtllm", "kubernetes", "dynamo"],
    }
    shutil.copytree(base / "serve", base / "trtllm")
    _yaml(base / "trtllm" / "spec.yaml", trtllm)
    for goal in goals:
        folder = base / f"plan-{goal}"
        code = run(
            ["plan", str(base / goal / "spec.yaml"), "-o", str(folder), "--time-limit", "5s"]
        )
        if code not in (0, 1):
            raise SystemExit(f"the sound spec of {goal} is not planned: exit code {code}")
        (folder / "steps.jsonl").write_text(steps)
        (folder / "log.txt").write_text(log)
        if goal == "trtllm":
            shutil.copytree(base / goal, folder, dirs_exist_ok=True)
        else:
            for name in "ab":
                shutil.copytree(folder, base / f"compared-{goal}" / name)
    shutil.copytree(base / "plan-train", base / "verified")
    plan = str(base / "verified")
    code = run([each.replace("{in}", plan).replace("{plan}", plan) for each in VERIFY])
    if code not in (0, 1):
        raise SystemExit(f"the sound plan is not verified: exit code {code}")
    _study(base)


def _study(base: Path) -> None:
    """Leave a study as after a kill: one finished trial, one claimed by a dead worker."""
    shutil.copytree(base / "verified", base / "study")
    (base / "study" / "trials" / "0001.json").unlink()
    with closing(sqlite3.connect(base / "study" / "trials" / "study.db")) as study, study:
        study.execute("UPDATE trials SET state = 'RUNNING' WHERE number = 1")
        study.execute("DELETE FROM trial_user_attributes WHERE key = 'record' AND trial_id = 2")
        left = '{"worker": null, "renewals": 0}'
        study.execute(f"UPDATE trial_user_attributes SET value_json = '{left}' WHERE key = 'lease'")
