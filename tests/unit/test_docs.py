# SPDX-License-Identifier: Apache-2.0
"""Everything that the docs refer to exists."""

import re

import pytest
import yaml
from support.commands import ROOT

from bapo import BAPOConfig

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


def test_every_experiment_is_on_the_page():
    text = (ROOT / "docs/configuration.md").read_text()
    assert not [path for path in (ROOT / "configs/experiment").glob("*.yaml") if f"`{path.stem}`" not in text]


def rows(page, heading):
    """Return the cells of each row of the first table below a heading."""
    section = (ROOT / page).read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.split("\n") if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def test_options_and_defaults_on_the_page_are_those_of_the_code():
    documented = {}
    for names, _, default in rows("docs/configuration.md", "Options of BAPO"):
        first, *more = re.findall("`(.*?)`", names)
        options = [first, *(first.removesuffix("_start") + ending for ending in more)]
        documented |= zip(options, default.strip("`").split(", "), strict=True)
    config = yaml.safe_load((ROOT / "recipe/bapo/config/bapo_trainer.yaml").read_text())
    shown = config["actor_rollout_ref"]["actor"]["policy_loss"].keys()
    assert documented.keys() == shown - {"_target_", "loss_mode"}
    for option in BAPOConfig.__dataclass_fields__:
        assert documented[option] == str(getattr(BAPOConfig, option)), option
