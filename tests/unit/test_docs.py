# SPDX-License-Identifier: Apache-2.0
"""Everything that the docs refer to exists."""

import re
from pathlib import Path

import pytest
import yaml

from bapo import BAPOConfig

ROOT = Path(__file__).parents[2]
FOLDERS = (
    [ROOT]
    + [ROOT / name for name in ("bapo", "configs", "recipe/bapo", "scripts", "tests", ".github")]
    + [ROOT / "docs" / name for name in ("", "dev", "results")]
)
PAGES = sorted(page for folder in FOLDERS for page in folder.glob("*.md"))


def anchors(page):
    """Return GitHub's anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_lead_somewhere(page):
    text = page.read_text()
    links = re.findall(r"\]\(([^):#]*)(?:#([^)]*))?\)", text)  # web addresses have a colon and do not match
    missing = []
    for link, anchor in links:
        target = page.parent / link if link else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            missing.append(f"{link}#{anchor}")
    paths = re.findall(r"`((?:bapo|configs|docs|recipe|scripts|tests)/[\w/.-]+)`", text)
    missing += [path for path in paths if not (ROOT / path).exists()]
    assert not missing


def test_every_option_method_and_experiment_is_in_the_table():
    text = (ROOT / "docs/configuration.md").read_text()
    for folder in ("method", "experiment"):
        for path in (ROOT / "configs" / folder).glob("*.yaml"):
            assert f"`{path.stem}`" in text, path
    config = yaml.safe_load((ROOT / "recipe/bapo/config/bapo_trainer.yaml").read_text())
    options = {names for names, *_ in rows("docs/configuration.md", "Options of BAPO")}
    for name in config["actor_rollout_ref"]["actor"]["policy_loss"].keys() - {"_target_", "loss_mode"}:
        family = re.sub("_(max|step)$", "_start", name)  # start, max and step share a row
        assert any(names.startswith(f"`{family}`") for names in options), name


def rows(page, heading):
    """Return the cells of each row of the first table below a heading."""
    section = (ROOT / page).read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.split("\n") if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def test_the_defaults_on_the_page_are_those_of_the_code():
    for names, _, default in rows("docs/configuration.md", "Options of BAPO"):
        first, *more = re.findall("`(.*?)`", names)
        if first not in ("record_dir", "token_dir"):
            options = [first, *(first.removesuffix("_start") + ending for ending in more)]
            written = default.strip("`").split(", ")
            assert written == [str(getattr(BAPOConfig, option)) for option in options], first
