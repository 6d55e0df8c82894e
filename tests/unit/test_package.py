# SPDX-License-Identifier: Apache-2.0
"""bapo/ needs only torch, and the packages of recipe/bapo import each other only as allowed."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def imports_of(path):
    """List the modules that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(module):
    """Return the room of a module: ``config`` for ``recipe.bapo.config.resolvers``; of ``run`` each file is a room."""
    first, *below = module.removeprefix("recipe.bapo").strip(".").split(".")
    return f"run.{below[0]}" if first == "run" and below else first


def test_the_direction_of_imports():
    folder = ROOT / "recipe" / "bapo"
    imports = {}
    for path in folder.rglob("*.py"):
        room = room_of(".".join(path.relative_to(folder).with_suffix("").parts))
        for module in imports_of(path):
            found = room_of(module) if module.startswith("recipe.bapo.") else module.split(".")[0]
            imports.setdefault(room, set()).add(found)
    ours = {room: found & imports.keys() - {room} for room, found in imports.items()}
    assert not ours["run.files"] and not ours["config"] and not ours["example"]
    assert not ours["advice"] and not imports["advice"] & {"verl", "torch"}
    assert not ours["tell"] and ours["record"] == {"tell"} and not imports["record"] & {"verl", "ray"}
    # The parent of a run starts main_bapo as a command.
    names = ("__main__", "watchdog", "console", "cleanup", "messages", "files", "metrics", "locks")
    parent = {f"run.{name}" for name in names}
    assert all(
        not imports[room] & {"verl", "torch", "hydra", "vllm"} and ours[room] <= parent | {"run.recipe"}
        for room in parent
    )
    # One module of run/ knows BAPO; start makes the language model, and the training process calls preflight.
    bapo = {room for room in ours if not room.startswith("run") and room != "config"}
    launcher = {room: found & bapo for room, found in ours.items() if room.startswith("run") and found & bapo}
    assert launcher.keys() == {"run.recipe", "run.start", "run.train"} and launcher["run.train"] == {"preflight"}
    # Of the others these import run/: the command for both, and two that ask it for its locks and files.
    users = {room: {one for one in ours[room] if one.startswith("run")} for room in bapo if room != "main_bapo"}
    assert {room: used for room, used in users.items() if used} == {
        "preflight": {"run.files", "run.locks"},
        "table": {"run.files", "run.metrics"},
    }
    assert list(TopologicalSorter(ours).static_order())  # raises a CycleError if there is a cycle


def test_bapo_imports_torch_and_the_standard_library_alone():
    modules = {module.split(".")[0] for path in (ROOT / "bapo").glob("*.py") for module in imports_of(path)}
    assert modules - set(sys.stdlib_module_names) == {"torch", "bapo"}


@pytest.mark.parametrize("module, torch", [("bapo", []), ("recipe.bapo.run.__main__", ["torch"])])
def test_importing_it_loads_no_framework(module, torch):
    names = ["verl", "ray", "hydra", "vllm", *torch]
    code = f"import sys, {module}; print([m for m in {names} if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"


def test_recipe_is_a_namespace():
    assert not (ROOT / "recipe" / "__init__.py").exists()
