"""From a spec that names link matrices to a plan, and to one line where it cannot be."""

from pathlib import Path

import pytest

from profilers.errors import ProfileUnreadableError
from tests.expect import present
from tests.tuner.models import MODELS
from tuner.api import plan
from tuner.cli.app import run
from tuner.engines.writers import emit
from tuner.errors import SpecError
from tuner.plans.train import VerifiedPlan

SPEC = """\
schema_version: 1
model: {model}
cluster:
  pools:
    - {{name: new, device: h100-sxm, nodes: 4, devices_per_node: 2, nic: 200Gbit/s,
        link_matrix: new.csv}}
    - {{name: old, device: a100-80gb, nodes: 2, devices_per_node: 2, nic: 200Gbit/s}}
  links:
    - {{between: [new, old], bandwidth: 400Gbit/s, latency: 20us}}
goal: {{kind: train, sequence_length: 8192, global_batch_size: 64}}
search:
  tensor_model_parallel_size: 1
  context_parallel_size: 1
  virtual_pipeline_model_parallel_size: 1
  micro_batch_size: 1
  data_parallel_size: 4
  dispatcher: alltoall
  a2a_overlap: false
  cuda_graph: none
emit: [megatron-bridge, slurm]
"""

LINKS = """\
bytes_per_s,a,b,c,d
a,,5e9,50e9,5e9
b,5e9,,5e9,50e9
c,50e9,5e9,,5e9
d,5e9,50e9,5e9,
"""


def written(folder: Path, *, links: str = LINKS, nodes: int = 4) -> Path:
    spec = SPEC.format(model=MODELS / "olmoe-1b-7b").replace("nodes: 4", f"nodes: {nodes}")
    (folder / "spec.yaml").write_text(spec)
    (folder / "new.csv").write_text(links)
    return folder / "spec.yaml"


def test_a_pool_of_two_is_put_in_order_and_handed_to_the_launcher(tmp_path: Path) -> None:
    made = plan(written(tmp_path), top=1).plan
    (order,) = present(made.placement).node_orders
    assert order.pool == "new"
    # Each stage of four devices takes two nodes, whose ring of gradients wants the fast link.
    pairs = {frozenset(order.nodes[at : at + 2]) for at in range(0, len(order.nodes), 2)}
    assert pairs <= {frozenset("ac"), frozenset("bd")}
    waived = VerifiedPlan.waive(made, reason="for a test")
    for target in made.emit:
        (hosts,) = [file for file in emit(target, waived) if file.path.name == "hosts.txt"]
        assert tuple(hosts.text.splitlines()) == present(made.placement).hosts
        assert len(present(made.placement).hosts) * 2 == present(made.decision).num_devices


def test_a_matrix_of_other_nodes_is_refused_before_anything_is_searched(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="the link_matrix of 'new' is of 4 nodes, the pool has 3"):
        plan(written(tmp_path, nodes=3))
    with pytest.raises(ProfileUnreadableError, match="'nan' from node 'a' to 'b' is no bandwidth"):
        plan(written(tmp_path, links=LINKS.replace("a,,5e9", "a,,nan")))


def test_the_command_line_says_it_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = written(tmp_path, links=LINKS.replace("d,5e9", "e,5e9"))
    assert run(["plan", str(spec), "-o", str(tmp_path / "plan")]) == 2
    assert "node 'e' has no column" in capsys.readouterr().err.strip().splitlines()[-1]
    assert not (tmp_path / "plan").exists()
