"""Who may import whom, and how much importing the package costs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hybridflow

ROOT = Path(hybridflow.__file__).parent

# A layer may import itself, the layers named here, and what is not part of hybridflow.
LAYERS = {
    "core": set(),
    "parallel": {"core"},
    "ops": {"core", "parallel"},
    "models": {"core", "ops", "parallel"},
    "reshard": {"core", "parallel", "models"},
    "generation": {"core", "models", "ops", "parallel"},
    "planner": {"core", "parallel", "ops", "models", "generation", "reshard"},
    "data": {"core"},
    "rollout": {"core", "data"},
    "telemetry": {"core"},
    "controller": {"core", "parallel"},
    "workers": {"core", "ops", "parallel", "models", "generation", "reshard", "data", "rollout", "controller"},
    "algorithms": {"core", "ops", "rollout"},
    "serving": {"core"},
    "train": {"core", "rollout", "telemetry"},
    "checkpoint": {"core"},
    "chaos": {"core", "telemetry"},
    "hooks": {"core", "telemetry", "train", "checkpoint"},
}


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def layer_files() -> list[tuple[str, Path]]:
    files = []
    for layer in LAYERS:
        folder = ROOT / layer
        files += [(layer, path) for path in (folder.rglob("*.py") if folder.is_dir() else [ROOT / f"{layer}.py"])]
    return files


@pytest.mark.parametrize(("layer", "path"), layer_files(), ids=str)
def test_layers_import_only_what_is_below_them(layer: str, path: Path) -> None:
    used = {name.split(".")[1] for name in imports(path) if name.startswith("hybridflow.")}
    assert used <= LAYERS[layer] | {layer}


def test_workers_know_the_protocols_and_nothing_else_of_the_controller() -> None:
    for path in (ROOT / "workers").glob("*.py"):
        used = {name for name in imports(path) if name.startswith("hybridflow.controller")}
        assert {".".join(name.split(".")[:3]) for name in used} <= {"hybridflow.controller.protocols"}


def test_algorithms_know_no_distribution() -> None:
    for path in (ROOT / "algorithms").glob("*.py"):
        assert not {name.split(".")[0] for name in imports(path)} & {"ray"}
        assert not [name for name in imports(path) if name.startswith("torch.distributed")]


def test_the_scheduler_and_the_cache_know_no_torch() -> None:
    for name in ("scheduler", "kv_cache", "request"):
        assert not [module for module in imports(ROOT / "generation" / f"{name}.py") if module.split(".")[0] == "torch"]


def test_layouts_and_plans_know_no_torch() -> None:
    code = "import sys; import hybridflow.reshard.plan; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout == "False\n"


def test_importing_hybridflow_is_light() -> None:
    code = (
        "import sys, resource; import hybridflow;"
        "usage = resource.getrusage(resource.RUSAGE_SELF);"
        "heavy = [name for name in ('ray', 'transformers', 'torch') if name in sys.modules];"
        "print(heavy, usage.ru_utime + usage.ru_stime < 2)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.split("\n")[0] == "[] True"


COMPILER = ("torch._dynamo", "sympy", "torch.distributed.fsdp", "torch.distributed.tensor")


@pytest.mark.parametrize("example", ["reverse", "cartpole"])
def test_a_run_imports_no_compiler(example: str, tmp_path: Path) -> None:
    """What torch would need for it takes as long to import as everything else, in every process of a run."""
    path = ROOT.parent / "examples" / f"{example}.toml"
    code = (
        "import sys; from pathlib import Path;"
        "from hybridflow.config import load_config; from hybridflow.launch import train;"
        f"keys = ['--run_dir', {str(tmp_path / 'run')!r}, '--train.steps', '1', '--evaluation.limit', '1'];"
        f"train(load_config(Path({str(path)!r}), keys));"
        f"print([name for name in {COMPILER} if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.splitlines()[-1] == "[]"
