"""What ranks write, and read again on another mesh; and that nobody waits for the disk."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import save, saved_tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from test_learner import LOSSES, batch, learner
from torch import Tensor

from hybridflow.build_model import DecoderSource, critic_networks, policy_networks, trained_reward
from hybridflow.core.errors import CheckpointError, ResourceError
from hybridflow.core.placement import Mesh
from hybridflow.models.spec import DecoderSpec
from hybridflow.parallel.mesh import Line
from hybridflow.workers import checkpoint
from hybridflow.workers.checkpoint import PieceReader, PieceWriter, kept, restore
from hybridflow.workers.optimizer import MOMENTS, Optimizer, OptimizerConfig
from hybridflow.workers.parts import Cut, Lines

KINDS: dict[str, Callable[..., Any]] = {
    "policy": lambda source, lines: policy_networks(source, 1.0, lines),
    "value": critic_networks,
    "reward": trained_reward,
}


def specs() -> st.SearchStrategy[DecoderSpec]:
    """Small decoders that four ranks can share, also unevenly."""
    heads = st.sampled_from([(4, 4), (6, 3), (4, 2), (4, 1), (9, 3)])
    return st.builds(
        lambda heads, tied, bias, norm: DecoderSpec(
            "llama", 11, 6, 7, 4, *heads, 2, 64, tied=tied, qkv_bias=bias, mlp_bias=bias, qk_norm=norm
        ),
        heads,
        st.booleans(),
        st.booleans(),
        st.booleans(),
    )


def trained(kind: str, source: DecoderSource, mesh: Mesh, rank: int) -> tuple[Any, Optimizer, Lines]:
    """What a rank has after a step: states that are made of its weights."""
    d, p, t = mesh.coordinates(rank)
    copy = Line(mesh.dp * mesh.cp, d * mesh.cp + mesh.context(rank))
    lines = Lines(tp=Line(mesh.tp, t), pp=Line(mesh.pp, p), dp_cp=copy)
    networks = KINDS[kind](source, lines)
    network = networks[kind]
    optimizer = Optimizer(network, OptimizerConfig(), 10, None if lines.whole else Cut(network, lines))
    for name, master in optimizer.masters.items():
        if not name.endswith("norm.weight"):  # as if they never had a gradient
            moments = {key: (master * number).detach() for number, key in enumerate(MOMENTS, start=2)}
            optimizer.adamw.state[master] = {"step": torch.tensor(3.0), **moments}
    return networks, optimizer, lines


def write(kind: str, source: DecoderSource, mesh: Mesh, folder: Path) -> None:
    folder.mkdir(parents=True)
    for rank in range(mesh.size):
        networks, optimizer, lines = trained(kind, source, mesh, rank)
        writer = PieceWriter()
        writer.start(folder / kind / f"{rank}.safetensors", kept(networks, {kind: optimizer}, lines))
        writer.done(True)


meshes = st.builds(Mesh, dp=st.integers(1, 3), tp=st.integers(1, 4), pp=st.integers(1, 3), cp=st.integers(1, 2))


@settings(max_examples=20, deadline=None)
@given(
    kind=st.sampled_from([*KINDS]), spec=specs(), mesh=meshes, other=meshes, dtype=st.sampled_from(["float32", "bfloat16"])
)
def test_what_one_mesh_writes_another_reads(
    kind: str, spec: DecoderSpec, mesh: Mesh, other: Mesh, dtype: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("run")
    source = DecoderSource("a model", spec, None, getattr(torch, dtype), torch.device("cpu"), seed=3)
    write(kind, source, mesh, folder / "one")
    write(kind, source, Mesh(), folder / "alone")
    one, alone = saved_tensors(folder / "one" / kind), saved_tensors(folder / "alone" / kind)
    assert one.keys() == alone.keys() and all(torch.equal(x, alone[name]) for name, x in one.items())
    files = [*(folder / "one" / kind).iterdir()]
    assert sum(map(_numbers, files)) == sum(map(_numbers, (folder / "alone" / kind).iterdir())), "nothing is there twice"
    for rank in range(other.size):
        expected, optimizer, _ = trained(kind, source, other, rank)
        fresh, restored, _ = trained(kind, replace(source, seed=4), other, rank)
        with PieceReader(folder / "one" / kind) as reader:
            restore(reader, fresh, {kind: restored}, {kind: 7})
        assert restored.steps == 7
        for name, x in expected[kind].named_parameters():
            assert torch.equal(fresh[kind].get_parameter(name), x), name
        states = {what: x for *what, x in map(list, optimizer.states()) for what in [tuple(what)]}
        again = {what: x for *what, x in map(list, restored.states()) for what in [tuple(what)]}
        assert states.keys() == again.keys()
        assert all(torch.equal(x, again[what]) for what, x in states.items())


def _numbers(path: Path) -> int:
    with checkpoint.safe_open(path, framework="pt") as file:
        return sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118


def test_the_ranks_of_equal_blocks_write_about_as_much(tmp_path: Path) -> None:
    spec = DecoderSpec("llama", 16, 16, 48, 12, 4, 2, 4, 64)
    source = DecoderSource("a model", spec, None, torch.float32, torch.device("cpu"), seed=3)
    write("policy", source, Mesh(dp=3), tmp_path / "run")
    sizes = [_numbers(path) for path in (tmp_path / "run" / "policy").iterdir()]
    assert len(sizes) == 3 and max(sizes) < 1.15 * sum(sizes) / 3


@pytest.mark.parametrize(("before", "after"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_run_that_goes_on_in_another_precision_loses_nothing(before: str, after: str, tmp_path: Path) -> None:
    spec = DecoderSpec("llama", 11, 6, 7, 2, 4, 2, 2, 64)
    source = DecoderSource("a model", spec, None, torch.float32, torch.device("cpu"), seed=3)
    networks, optimizer, lines = trained("policy", replace(source, dtype=getattr(torch, before)), Mesh(), 0)
    with torch.no_grad():
        for master in optimizer.masters.values():
            master.add_(1e-6)
    optimizer._round()
    writer = PieceWriter()
    (tmp_path / "run").mkdir()
    writer.start(tmp_path / "run" / "policy" / "0.safetensors", kept(networks, {"policy": optimizer}, lines))
    writer.done(True)
    fresh, restored, _ = trained("policy", replace(source, dtype=getattr(torch, after), seed=4), Mesh(), 0)
    with PieceReader(tmp_path / "run" / "policy") as reader:
        restore(reader, fresh, {"policy": restored}, {"policy": 7})
    assert all(torch.equal(master, restored.masters[name]) for name, master in optimizer.masters.items())
    assert all(torch.equal(p, restored.masters[n].to(p.dtype)) for n, p in fresh["policy"].named_parameters())


class Slow:
    """A disk that waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self.go, write_tensors = threading.Event(), checkpoint.write_tensors

        def write(*args: Any) -> Any:
            assert self.go.wait(20)
            if error is not None:
                raise error
            return write_tensors(*args)

        monkeypatch.setattr(checkpoint, "write_tensors", write)


def test_updates_go_on_while_what_was_saved_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, one, straight = Slow(monkeypatch), learner(), learner()
    for trainee in (one, straight):
        trainee.update(batch(), LOSSES[0])
    before = {name: p.detach().clone() for name, p in one.model.named_parameters()}
    (tmp_path / "run").mkdir()
    state = one.save(tmp_path / "run" / "actor")
    for trainee in (one, straight):
        trainee.update(batch(seed=3), LOSSES[0])
    assert one.saved(False) == [None]
    disk.go.set()
    (files,) = one.saved(True)
    assert files is not None and one.saved(False) == [files]
    assert [file.name for file in files] == ["actor/0.safetensors"] and state["version"] == 1
    resumed = learner()
    resumed.load(tmp_path / "run" / "actor", state, files)
    assert all(torch.equal(p, before[name]) for name, p in resumed.model.named_parameters())
    resumed.update(batch(seed=3), LOSSES[0])
    for other in (straight, resumed):
        assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("error", "kind", "told"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), ResourceError, "the disk is full .* earlier checkpoints"),
        (PermissionError(errno.EACCES, "Permission denied"), PermissionError, "Permission denied"),
    ],
)
def test_an_error_of_writing_is_told_when_it_is_asked_for(
    error: Exception, kind: type[Exception], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, one = Slow(monkeypatch, error), learner()
    (tmp_path / "run").mkdir()
    one.save(tmp_path / "run" / "actor")
    disk.go.set()
    with pytest.raises(kind, match=told):
        one.saved(True)


def test_a_folder_that_a_rank_does_not_see_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="elsewhere: not there on this machine; all machines must share it"):
        learner().save(tmp_path / "elsewhere" / "actor")
    (tmp_path / "marker").touch()
    learner().sees(tmp_path / "marker")
    with pytest.raises(CheckpointError, match=r"rank 0, on .* doesn't see it; use a run_dir that all machines share"):
        learner().sees(tmp_path / "no marker")


def test_what_does_not_fit_is_told_with_its_name(tmp_path: Path) -> None:
    spec = DecoderSpec("llama", 11, 6, 7, 2, 4, 2, 2, 64)
    source = DecoderSource("a model", spec, None, torch.float32, torch.device("cpu"), seed=3)
    write("policy", source, Mesh(tp=2), tmp_path / "run")

    def load(changed: DecoderSpec) -> None:
        networks, optimizer, _ = trained("policy", replace(source, spec=changed), Mesh(), 0)
        with PieceReader(tmp_path / "run" / "policy") as reader:
            restore(reader, networks, {"policy": optimizer}, {"policy": 1})

    load(spec)
    with pytest.raises(CheckpointError, match=r"gate.weight is \[7, 6\], this run's is \[9, 6\]; resume with the model"):
        load(replace(spec, intermediate_size=9))
    with pytest.raises(CheckpointError, match=r"layers.2.attention_norm.weight is missing; resume with the model"):
        load(replace(spec, num_layers=3))
    (tmp_path / "run" / "policy" / "1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"policy: row 5 of policy.decoder.embed.weight is in none of the files"):
        load(spec)


def test_a_damaged_file_is_found_by_the_rank_that_checks_it(tmp_path: Path) -> None:
    saved = save(learner(), tmp_path / "run" / "actor")
    learner().load(*saved)
    path = tmp_path / "run" / "actor" / "0.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"actor/0.safetensors: missing or damaged"):
        learner().load(*saved)


def test_networks_that_are_no_decoders_are_saved_whole(tmp_path: Path) -> None:
    from test_replica import Tied

    tied = Tied(torch.Generator().manual_seed(0))
    optimizer = Optimizer(tied, OptimizerConfig(), 10)
    (tmp_path / "run").mkdir()
    writer = PieceWriter()
    writer.start(tmp_path / "run" / "q" / "0.safetensors", kept({"q": tied, "target": tied}, {"q": optimizer}, Lines()))
    writer.done(True)
    tensors: dict[str, Tensor] = saved_tensors(tmp_path / "run" / "q")
    assert {f"{network}.{name}" for network in ("q", "target") for name in ("first.weight", "mean", "count")} == {*tensors}
    assert torch.equal(tensors["q.first.weight"], tied.first.weight) and tensors["q.count"].item() == 7
