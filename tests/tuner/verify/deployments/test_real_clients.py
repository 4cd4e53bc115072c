"""The clients themselves against the tiny server, through the emitted benchmark where there is one.

MOETUNE_ENGINES_PYTHON names the interpreter of an environment that has vLLM, SGLang or AIPerf; no
client needs an accelerator. The model is a tokenizer of 500 words.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.expect import present
from tuner.goals.serve_trial import Reached
from tuner.goals.verify import deployment_trials, verify_serve

pytestmark = pytest.mark.slow

TRAFFIC = {"concurrency": 4, "input_tokens": 20, "output_tokens": 8}

TOKENIZER = """
import json, pathlib, sys
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
words = ["<unk>", "</s>", *(f"w{number}" for number in range(500))]
made = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
fast = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="</s>")
fast.save_pretrained(sys.argv[1])
config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 502,
          "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
pathlib.Path(sys.argv[1], "config.json").write_text(json.dumps(config))
"""

STAND_INS = """
import importlib.abc, importlib.machinery, importlib.util, sys
from unittest.mock import MagicMock

class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("datasets", "torchvision"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        made = MagicMock(__path__=[], __spec__=spec, __version__="0.30.0")
        return made
    def exec_module(self, module):
        pass

sys.meta_path.append(Absent())
"""
"""SGLang's client imports data sets of pictures, which are never asked for; asked last, so that an
installed package is used."""

NEEDED = {"aiperf": ("aiperf", "ruamel.yaml")}
"""Some environments hold AIPerf without what it imports."""

SGLANG = (
    "python -m sglang.bench_serving --backend sglang-oai --base-url {url} --model {model}"
    " --dataset-name random-ids --random-input-len {input_tokens}"
    " --random-output-len {output_tokens} --random-range-ratio 1.0 --num-prompts {requests}"
    " --max-concurrency {concurrency} --request-rate {rate} --warmup-requests {warmups}"
    " --seed {seed} --output-file {result} --goodput ttft:60000 tpot:60000"
)


@pytest.fixture
def engines(tmp_path: Path) -> Callable[[str], dict[str, str]]:
    """Return the environment of a client, or skip where its package is not installed."""
    python = os.environ.get("MOETUNE_ENGINES_PYTHON", sys.executable)

    def environment(package: str) -> dict[str, str]:
        outcome = subprocess.run(
            [
                python,
                "-c",
                f"import importlib.util as u; raise SystemExit(not u.find_spec({package!r}))",
            ],
            check=False,
        )
        if outcome.returncode:
            pytest.skip(f"{package} is not installed; set MOETUNE_ENGINES_PYTHON")
        model = tmp_path / "model"
        subprocess.run([python, "-c", TOKENIZER, str(model)], check=True, capture_output=True)
        stand_ins = tmp_path / "stand-ins"
        stand_ins.mkdir()
        (stand_ins / "sitecustomize.py").write_text(STAND_INS)
        return {
            **os.environ,
            "PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(stand_ins),
            "MODEL": str(model),
            # AIPerf takes a path that exists for the name of a repository when it is offline.
            **({"HF_HUB_OFFLINE": "1"} if package != "aiperf" else {}),
        }

    return environment


@pytest.mark.parametrize(
    ("package", "metrics", "bench"),
    [
        ("vllm", "vllm-bench", ""),
        ("sglang", "sglang-bench", SGLANG),
        ("aiperf", "aiperf", ""),
    ],
)
def test_a_client_measures_what_the_server_does(
    engines: Callable[[str], dict[str, str]],
    write_plan: Callable[..., Path],
    server: Callable[..., str],
    url: str,
    package: str,
    metrics: str,
    bench: str,
) -> None:
    folder = write_plan(traffic=TRAFFIC, slo={"ttft": {"p90": 60.0}, "tpot": {"p99": 60.0}})
    by = deployment_trials(
        folder=folder,
        command=server("--ttft", "0.05", "--tpot", "0.01"),
        benchmark=bench,
        metrics=metrics,
        runs=2,
        start_s=60.0,
        on_message=lambda _line: None,
        environment=engines(package),
    )
    outcome = verify_serve(folder, trials=1, resume=False, by=by, reached=Reached(url=url))
    (trial,) = outcome.trials
    assert (trial.status, trial.reason) == ("ok", "")
    assert (trial.runs, trial.failed_ratio) == (2, 0.0)
    assert trial.holds_targets
    assert trial.measured_goodput_per_device is not None
    # The server never waits less than 50 ms and 10 ms; 2 % are for clocks and rounding.
    for spread, least_s in (
        (present(trial.measured_ttft), 0.05),
        (present(trial.measured_tpot), 0.01),
    ):
        assert spread.p50 is not None
        assert least_s * 0.98 <= spread.p50
        assert spread.p50 <= present(spread.p90) <= present(spread.p99)
    assert not any("tokens on average" in note for note in outcome.notes)
