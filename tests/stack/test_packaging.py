# SPDX-License-Identifier: Apache-2.0
"""Install the package with each of its extras in an empty environment, and run commands there. Minutes each."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TORCH = next(line for line in (ROOT / "requirements.txt").read_text().splitlines() if line.startswith("torch=="))

# recipe.bapo.verl_patches.cpu.vllm is left out: it imports vLLM, which is not in verl's extra because its build depends
# on the machine.
IMPORT_ALL = """
import importlib, pkgutil, sys

package = importlib.import_module(sys.argv[1])
names = [m.name for m in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
left_out = {"recipe.bapo.verl_patches.cpu.vllm"} | {name for name in names if name.endswith("__main__")}
for name in sorted(set(names) - left_out):
    importlib.import_module(name)
print("imported", len(names) - len(left_out))
"""


def install(folder, extra):
    """Install this package with one of its extras in an empty environment. Returns its Python."""
    source = folder.with_name("source")  # without build/, of which setuptools also packs what earlier builds have left
    for name in ("bapo", "recipe"):
        shutil.copytree(ROOT / name, source / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    # Install torch with pip, which finds a CPU build if there is one, and the rest with uv, as the set-up script does.
    subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", TORCH], check=True)
    uv = Path(sys.executable).with_name("uv")
    subprocess.run([uv, "pip", "install", "-q", "--python", python, f"{source}{extra}"], check=True)
    return python


def run(python, *arguments, cwd, **environment):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VERL"))}
    done = subprocess.run(
        [python, *arguments], cwd=cwd, env={**kept, **environment}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_verls_extra_brings_what_recipe_and_checks_import(tmp_path):
    python = install(tmp_path / "venv", "[verl]")
    assert "imported" in run(python, "-c", IMPORT_ALL, "recipe.bapo", cwd=tmp_path, VERL_PLATFORM="cpu")


@pytest.mark.slow
def test_the_report_runs_where_neither_verl_nor_ray_is_installed(tmp_path):
    python = install(tmp_path / "venv", "[report]")
    assert "imported" in run(python, "-c", IMPORT_ALL, "recipe.bapo.report", cwd=tmp_path)
    said = run(python.with_name("bapo-report"), ROOT / "docs/examples", "--out", "report.png", cwd=tmp_path)
    assert "5. In short" in said and (tmp_path / "report.png").stat().st_size > 10_000
    has_neither_verl_nor_ray(python)


@pytest.mark.slow
def test_the_table_runs_where_neither_verl_nor_ray_is_installed(tmp_path):
    python = install(tmp_path / "venv", "[table]")
    assert "imported" in run(python, "-c", IMPORT_ALL, "recipe.bapo.table", cwd=tmp_path)
    logs = ROOT / "docs/results/language_model"
    runs = [f"{name}={logs}/stack_{name}_4_epochs.jsonl" for name in ("grpo", "bapo")]
    said = run(python.with_name("bapo-table"), *runs, cwd=tmp_path)
    assert "| bapo | 1 | 1 | 0.625 | - | +0.070 |" in said and (tmp_path / "table.pdf").exists()
    has_neither_verl_nor_ray(python)


def has_neither_verl_nor_ray(python):
    listed = subprocess.run([python, "-m", "pip", "list"], capture_output=True, text=True, check=True).stdout
    assert not {"verl", "ray"} & {line.split()[0] for line in listed.splitlines()}
