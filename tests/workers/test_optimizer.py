import pytest
import torch
from torch import nn

from hybridflow.core.errors import ConfigError
from hybridflow.workers.optimizer import AdamW, Optimizer, OptimizerConfig, learning_rate_scale, training_bytes
from hybridflow.workers.parts import WHOLE
from hybridflow.workers.zero import ShardedOptimizer


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)


def step(module: nn.Module, optimizer: Optimizer, parts: int = 1) -> None:
    torch.manual_seed(1)
    x = torch.randn(8, 4).to(next(module.parameters()).dtype)
    optimizer.zero_grad()
    for part in x.chunk(parts):
        (module(part).float().square().sum() / len(x)).backward()
    optimizer.clip()
    optimizer.step()


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, 0.8536, 0.5, 0.1464]),
    ],
)
def test_schedules(schedule: str, expected: list[float]) -> None:
    config = OptimizerConfig(warmup_steps=2, schedule=schedule)
    assert [learning_rate_scale(config, s, 6) for s in range(6)] == pytest.approx(expected, abs=1e-4)


def test_fp32_equals_torch() -> None:
    ours, theirs = net(), net()
    optimizer = Optimizer(ours, OptimizerConfig(lr=0.01, weight_decay=0.1, max_grad_norm=0.5), 10)
    matrices = [p for p in theirs.parameters() if p.dim() >= 2]
    others = [p for p in theirs.parameters() if p.dim() < 2]
    reference = torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], 0.01, weight_decay=0.1)
    for _ in range(3):
        step(ours, optimizer)
        torch.manual_seed(1)
        reference.zero_grad()
        (theirs(torch.randn(8, 4)).square().sum() / 8).backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        reference.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_bf16_masters_collect_small_steps() -> None:
    """A step far below bf16's resolution is lost without masters; with them many of them add up."""
    module = net(torch.bfloat16)
    before = module[0].weight.detach().clone()
    optimizer = Optimizer(module, OptimizerConfig(lr=1e-5), 1000)
    for _ in range(200):
        step(module, optimizer)
    moved = (optimizer.masters["0.weight"] - before.float()).abs().mean()
    assert 1e-3 < float(moved) < 2.1e-3
    assert (module[0].weight != before).any()
    torch.testing.assert_close(module[0].weight, optimizer.masters["0.weight"].bfloat16(), rtol=0, atol=0)


def test_bf16_gradients_of_microbatches_add_up_in_fp32() -> None:
    whole, split = net(torch.bfloat16), net(torch.bfloat16)
    for module, parts in ((whole, 1), (split, 8)):
        optimizer = Optimizer(module, OptimizerConfig(lr=0.0001), 10)
        step(module, optimizer, parts)
        assert all(master.grad.dtype == torch.float32 for master in optimizer.masters.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resume_is_bit_exact(dtype: torch.dtype) -> None:
    straight, first = net(dtype), net(dtype)
    config = OptimizerConfig(lr=0.01, schedule="cosine", warmup_steps=2)
    one, two = Optimizer(straight, config, 6), Optimizer(first, config, 6)
    for _ in range(6):
        step(straight, one)
    for _ in range(3):
        step(first, two)
    resumed = net(dtype)
    resumed.load_state_dict(first.state_dict())
    three = Optimizer(resumed, config, 6)
    kept = {(key, name): tensor.clone() for key, name, tensor in two.states()}
    assert {key for key, _ in kept} == {"step", "exp_avg", "exp_avg_sq", *(["master"] if dtype == torch.bfloat16 else [])}
    three.load(two.steps, lambda *what: kept.get(what))
    for _ in range(3):
        step(resumed, three)
    for a, b in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def test_frozen_parameters_do_not_move() -> None:
    module = net()
    before = module[0].weight.detach().clone()
    optimizer = Optimizer(module, OptimizerConfig(lr=0.1, freeze=("0.*",)), 10)
    step(module, optimizer)
    assert torch.equal(module[0].weight, before)
    assert set(optimizer.masters) == {"2.weight", "2.bias"}


@pytest.mark.parametrize(("pattern", "message"), [("layers.*", "matches no parameter"), ("*", "freeze every parameter")])
def test_freeze_patterns_that_make_no_sense(pattern: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Optimizer(net(), OptimizerConfig(freeze=(pattern,)), 10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_bytes_are_those_that_an_optimizer_holds(dtype: torch.dtype) -> None:
    module = net(dtype)
    optimizer = Optimizer(module, OptimizerConfig(freeze=("0.weight",)), 10)
    step(module, optimizer)
    gradients = sum(master.grad.nbytes for master in optimizer.masters.values() if master.grad is not None)
    moments = [state[name].nbytes for state in optimizer.adamw.state.values() for name in ("exp_avg", "exp_avg_sq")]
    copies = [master.nbytes for name, master in optimizer.masters.items() if master is not optimizer.parameters[name]]
    assert training_bytes(module) == (gradients, sum(moments) + sum(copies))
    assert bool(copies) == (dtype == torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_summed_gradients_leave_alone_what_no_rank_has_a_gradient_for(dtype: torch.dtype) -> None:
    """Two ranks: the first layer has a gradient on one of them, the last on both, its bias on neither."""
    modules = [net(dtype) for _ in range(2)]
    ranks = [Optimizer(module, OptimizerConfig(lr=0.01, weight_decay=0.1), 10) for module in modules]
    modules[0][2](modules[0][0](torch.ones(3, 4, dtype=dtype))).float().sum().backward()
    modules[1][2](torch.ones(3, 8, dtype=dtype)).float().sum().backward()
    for rank in ranks:
        rank.masters["2.bias"].grad = None
    grads = [{n: None if m.grad is None else m.grad.clone() for n, m in rank.masters.items()} for rank in ranks]
    flats: list[torch.Tensor] = []
    for rank in ranks:
        rank.sum_gradients(lambda flat: flats.append(flat.clone()) or flat)
    assert len(flats) == 2 and all(flat.dtype == torch.float32 and flat.is_contiguous() for flat in flats)
    for rank, kept in zip(ranks, grads, strict=True):
        for name, master in rank.masters.items():
            master.grad = kept[name]
        rank.sum_gradients(lambda flat: flat.copy_(flats[0] + flats[1]))
        assert rank.masters["2.bias"].grad is None
        assert torch.equal(rank.masters["0.weight"].grad, grads[0]["0.weight"])
        assert torch.equal(rank.masters["2.weight"].grad, grads[0]["2.weight"] + grads[1]["2.weight"])
        before = {name: p.detach().clone() for name, p in rank.parameters.items()}
        rank.clip()
        rank.step()
        assert [name for name, p in rank.parameters.items() if torch.equal(p, before[name])] == ["2.bias"]
    assert all(torch.equal(a, b) for a, b in zip(modules[0].parameters(), modules[1].parameters(), strict=True))


def transposed(module: nn.Module) -> nn.Module:
    """The same weights, the matrices stored transposed as those of a hybrid engine are."""
    for parameter in module.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.data.t().contiguous().t()
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Optimizer, ShardedOptimizer])
def test_how_weights_lie_in_memory_changes_no_step(kind: type[Optimizer], dtype: torch.dtype) -> None:
    """Neither do flat sums of gradients, nor moments that were loaded."""
    results = []
    for module in (net(dtype), transposed(net(dtype))):
        further = (None, WHOLE) if kind is ShardedOptimizer else ()
        optimizer = kind(module, OptimizerConfig(lr=0.01, max_grad_norm=100.0), 10, *further)
        for _ in range(3):
            x = torch.arange(32.0).view(8, 4).to(dtype) / 32
            optimizer.zero_grad()
            module(x).float().square().sum().backward()
            optimizer.reduce_gradients(lambda flat: flat * 2)
            optimizer.clip()
            optimizer.step()
            kept = {(key, name): tensor.contiguous().clone() for key, name, tensor in optimizer.states()}
            optimizer.load(optimizer.steps, lambda *what, kept=kept: kept.get(what))
        results.append([p.detach().clone() for p in module.parameters()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_parameters_that_do_not_move_are_not_counted() -> None:
    ours, theirs = ([torch.ones(2), torch.ones(3)] for _ in range(2))
    adamw = AdamW([(ours, 0.1)], OptimizerConfig(lr=0.1))
    reference = torch.optim.AdamW(theirs, lr=0.1, weight_decay=0.1, eps=1e-8)
    for moved in ([0], [0, 1], [1], [0, 1]):
        for parameters in (ours, theirs):
            for index, parameter in enumerate(parameters):
                parameter.grad = torch.arange(1.0, len(parameter) + 1) if index in moved else None
        adamw.step()
        reference.step()
    assert all(torch.allclose(*pair, rtol=1e-6) for pair in zip(ours, theirs, strict=True))
    assert [float(adamw.state[parameter]["step"]) for parameter in ours] == [3, 3]
