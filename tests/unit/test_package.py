"""bapo/ is pure torch, and importing it needs nothing else."""

import ast
import subprocess
import sys
from pathlib import Path

import bapo

ROOT = Path(__file__).parents[2]


def test_bapo_imports_torch_and_the_standard_library_alone():
    modules = set()
    for path in (ROOT / "bapo").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules.update(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                modules.add(node.module.split(".")[0])
    assert modules - set(sys.stdlib_module_names) == {"torch", "bapo"}


def test_importing_bapo_loads_no_framework():
    code = "import sys, bapo; print([m for m in ('verl', 'ray', 'hydra', 'vllm', 'omegaconf') if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"


def test_the_public_names():
    for name in ("BAPOConfig", "ClipStatistics", "collect_clip_statistics", "search_clip_bounds", "find_clip_bounds"):
        assert name in bapo.__all__ and hasattr(bapo, name)
    assert bapo.__version__.count(".") == 2


def test_recipe_is_a_namespace():
    assert not (ROOT / "recipe" / "__init__.py").exists()
