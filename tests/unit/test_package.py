# SPDX-License-Identifier: Apache-2.0
"""bapo/ needs only torch, no import of the recipe goes up, and every name of a module leads to one."""

import ast
import os
import re
import subprocess
import sys

import pytest
from support.commands import ROOT


def imports_of(path):
    """List the modules that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


# The rooms of the recipe, from the lowest floor up: each imports only rooms before it.
FLOORS = ["config", "example", "host", "hook", "language_model", "verl_patches", "policy_loss", "report", "table"]
FLOORS += ["preflight", "run", "main_bapo"]


def test_no_import_goes_up():
    folder = ROOT / "recipe" / "bapo"
    for path in folder.rglob("*.py"):
        room, *_ = path.relative_to(folder).with_suffix("").parts
        below = {f"recipe.bapo.{name}" for name in FLOORS[: FLOORS.index(room) + 1]} if room != "__init__" else set()
        for module in imports_of(path):
            if module.startswith("recipe.bapo."):
                assert ".".join(module.split(".")[:3]) in below, f"{path} imports {module}"


def test_what_stands_behind_the_lines_writes_record_and_tokens_alone():
    """docs/production.md says so."""
    outward = {"socket", "subprocess", "multiprocessing", "pickle", "shelve", "shutil", "tempfile", "urllib", "http"}
    outward |= {"requests", "ctypes", "ray", "asyncio"}
    reading = {"open", "read_text", "read_bytes", "write_text", "write_bytes", "unlink", "mkdir", "touch", "system"}
    recipe = ROOT / "recipe/bapo"
    for path in [
        *(ROOT / "bapo").glob("*.py"),
        *(recipe / "hook").glob("*.py"),
        recipe / "policy_loss.py",
        *recipe.glob("verl_patches/f*.py"),
        recipe / "verl_patches/cpu/__init__.py",  # which every process with verl imports
    ]:
        assert not {module.split(".")[0] for module in imports_of(path)} & outward, path
        calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        names = {getattr(function, "id", getattr(function, "attr", "")) for function in calls}
        assert path.name in ("record.py", "tokens.py") or not names & reading, path


NAMES = re.compile(r"\brecipe\.bapo(?:\.[a-z_]\w*)+(?:\.[A-Z]\w*)?")


def test_every_name_of_a_module_in_yaml_pages_and_messages_can_be_imported():
    files = [path for ending in ("*.py", "*.md", "*.yaml", "*.toml", "*.sh") for path in ROOT.rglob(ending)]
    ours = [path for path in files if not path.relative_to(ROOT).parts[0].startswith((".venv", ".megatron", "runs"))]
    names = {name for path in ours if path.name != "CHANGELOG.md" for name in NAMES.findall(path.read_text())}
    assert len(names) > 50
    missing = [name for name in sorted(names) if not leads_somewhere(name)]
    assert not missing


def leads_somewhere(name):
    """Whether a dotted name is a module, or an attribute of one, by its file and without an import of it."""
    parts = name.split(".")
    for end in range(len(parts), 2, -1):
        path = ROOT.joinpath(*parts[:end])
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if file.exists():
            rest = parts[end:]
            return not rest or re.search(rf"\b{rest[0]}\b", file.read_text()) is not None
    return False


def test_bapo_imports_torch_and_the_standard_library_alone():
    modules = {module.split(".")[0] for path in (ROOT / "bapo").glob("*.py") for module in imports_of(path)}
    assert modules - set(sys.stdlib_module_names) == {"torch", "bapo"}


def test_the_tests_of_bapo_need_nothing_of_the_recipe():
    """.github/CONTRIBUTING.md names these files to who keeps ``bapo/`` alone."""
    names = ("search", "loss", "golden", "config", "numerics", "distributed")
    kept = [ROOT / f"tests/unit/test_{name}.py" for name in names]
    kept += [ROOT / "tests/support/oracle.py", ROOT / "tests/support/batches.py"]
    page = (ROOT / ".github/CONTRIBUTING.md").read_text()
    for path in kept:
        assert path.name in page
        ours = {module for module in imports_of(path) if module.startswith(("recipe", "scripts", "support.", "verl"))}
        assert not {module for module in ours if not module.startswith(("support.oracle", "support.batches"))}, path


@pytest.mark.parametrize(
    "module, unwanted",
    [
        ("recipe.bapo.run.__main__", ["torch", "ray"]),  # a run's parent, which starts at once
        ("recipe.bapo.report.__main__", ["ray"]),
        ("recipe.bapo.hook.record", ["ray"]),
        ("recipe.bapo.hook.own_clip", ["ray"]),
    ],
)
def test_importing_it_loads_no_framework(module, unwanted):
    names = ["verl", "hydra", "vllm", "tensordict", *unwanted]
    code = f"import sys, {module}; print([m for m in {names} if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"


def test_recipe_is_a_namespace():
    assert not (ROOT / "recipe" / "__init__.py").exists()


def test_the_readmes_check_needs_only_what_it_installs():
    (arguments,) = re.findall(r"^check/bin/python -m pytest (.*)$", (ROOT / "README.md").read_text(), re.M)
    absent = ("verl", "ray", "hydra", "omegaconf", "datasets", "transformers", "tensordict", "pandas", "pyarrow")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({absent})); import pytest\n"
        f"sys.exit(pytest.main({[*arguments.split(), '-q', '-k', 'golden', '-p', 'no:cacheprovider']}))"
    )
    alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # Hydra has one
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=alone, capture_output=True, text=True)
    assert run.returncode == 0 and "24 passed" in run.stdout, run.stdout + run.stderr
