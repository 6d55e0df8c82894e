# SPDX-License-Identifier: Apache-2.0
"""Write the recipe in the form of verl's collection of recipes: only the loss, its worker and its trainer.

    .venv/bin/python -m scripts.verl_recipe.export FOLDER

This writes ``FOLDER/bapo``, with the core in ``core/`` and relative imports. The folder works as ``recipe.bapo`` in
verl's tree and needs no installed package of ours. It leaves out launch, checks, the CPU platform, the report and data
sets. Three files differ from ours and are in this folder: the entry point, the README, and the config, to which the
command adds BAPO's options.
"""

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipe" / "bapo"
OWN = Path(__file__).parent
TAKEN = (
    "policy_loss.py",
    "worker.py",
    "trainer.py",
    "compatibility.py",
    "fused_head.py",
    "health.py",
    "micro_batches.py",
    "records/bounds.py",
    "records/metrics.py",
    "records/tokens.py",
)
MARK = "    # BAPO's options, from the repository's bapo_trainer.yaml.\n"

# The same rules as in the collection's pyproject.toml.
COLLECTIONS_STYLE = """line-length = 120
[lint]
isort = {known-first-party = ["verl"]}
select = ["E", "F", "UP", "B", "I", "G"]
ignore = ["F405", "F403", "E731", "B007", "UP032", "G004", "UP045", "UP035"]
"""


def export(folder: Path) -> Path:
    """Write the recipe to ``folder / "bapo"`` and return this path.

    Raises:
        FileExistsError: ``folder / "bapo"`` exists already.
    """
    target = folder / "bapo"
    (target / "config").mkdir(parents=True)
    (target / "core").mkdir()
    (target / "records").mkdir()
    for path in (ROOT / "bapo").glob("*.py"):
        (target / "core" / path.name).write_text(with_relative_imports(path.read_text(), "core"))
    for name in (*TAKEN, "records/__init__.py"):
        text = (RECIPE / name).read_text()
        (target / name).write_text(with_relative_imports(text, Path(name).parent.name))
    (target / "__init__.py").write_text("")
    for name in ("main_bapo.py", "README.md"):
        shutil.copy(OWN / name, target / name)
    shutil.copy(RECIPE / "REQUIRED_VERL.txt", target / "REQUIRED_VERL.txt")
    frame = (OWN / "bapo_trainer.yaml").read_text()
    (target / "config" / "bapo_trainer.yaml").write_text(frame.replace(MARK, options_with_comments()))
    (target / "ruff.toml").write_text(COLLECTIONS_STYLE)
    subprocess.run([sys.executable, "-m", "ruff", "check", "--no-cache", "--quiet", "--fix", target], check=True)
    subprocess.run([sys.executable, "-m", "ruff", "format", "--no-cache", "--quiet", target], check=True)
    (target / "ruff.toml").unlink()  # the collection has its own style file
    return target


def with_relative_imports(text: str, package: str) -> str:
    """Make a file's imports relative; ``package`` is where the file is: ``core``, ``records``, or "" for the recipe."""
    up = ".." if package else "."
    core = "." if package == "core" else f"{up}core"
    text = re.sub(r"^from bapo import", f"from {core} import", text, flags=re.M)
    text = re.sub(r"^from bapo\.", f"from {core if core.endswith('.') else core + '.'}", text, flags=re.M)
    text = re.sub(r"^from recipe\.bapo import", f"from {up} import", text, flags=re.M)
    return re.sub(r"^from recipe\.bapo\.", f"from {up}", text, flags=re.M)


def options_with_comments() -> str:
    """Return the text of the block ``policy_loss`` of our config."""
    text = (RECIPE / "config" / "bapo_trainer.yaml").read_text()
    return re.search(r"^    policy_loss:\n(?:      .*\n)+", text, re.M).group()


def main():
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    target = export(parser.parse_args().folder)
    lines = sum(len(path.read_text().splitlines()) for path in target.rglob("*.py"))
    print(f"{target}: {lines} lines of Python")


if __name__ == "__main__":
    main()
