# SPDX-License-Identifier: Apache-2.0
"""What we rely on in verl 0.9.1, as far as a change would break it silently. tests/actor covers the rest."""

import importlib.util
import re
from pathlib import Path

from omegaconf import OmegaConf

import verl
from recipe.bapo.hook.compatibility import UNSUPPORTED_STRATEGIES
from recipe.bapo.hook.verl_version import RUN_WITH
from recipe.bapo.preflight.machine import VERL
from recipe.bapo.run import trainer
from verl.trainer.ppo.v1 import get_trainer_cls, trainer_base
from verl.workers.config import ActorConfig, McoreActorConfig, McoreEngineConfig

ROOT = Path(__file__).parents[2]


def test_every_file_names_the_version_that_was_read():
    text = (ROOT / "recipe/bapo/REQUIRED_VERL.txt").read_text()
    lines = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    # install_verl.sh of verl's collection of recipes reads this if MODE is pinned_tag.
    assert lines["MODE"] == "pinned_tag" and lines["TAG"] == f"v{VERL}" and lines["COMMIT"]
    assert lines["PIP_INSTALL"].startswith(f"pip install verl=={VERL} TransferQueue==")
    assert lines["UPSTREAM"].endswith("/verl.git")
    assert verl.__version__ == VERL and f"verl=={VERL}\n" in (ROOT / "requirements.txt").read_text()


def test_the_page_and_the_message_name_the_same_releases():
    page = (ROOT / "docs/your_own_run.md").read_text()
    rows = re.findall(r"^\| (.*?) \| \*\*run\*\*", page, re.M)
    on_page = [name for row in rows for name in re.findall(r"\b0\.\d+\.\d+\b", row.split("(")[0])]
    assert on_page == re.findall(r"\b0\.\d+\.\d+\b", RUN_WITH) and VERL in on_page


def test_each_mode_gets_our_trainer_on_top_of_its_own(monkeypatch):
    of_verl = dict(trainer_base.TRAINER_REGISTRY)
    monkeypatch.setattr(trainer_base, "TRAINER_REGISTRY", registry := dict(of_verl))
    monkeypatch.setattr(trainer, "TRAINER_REGISTRY", registry)
    monkeypatch.setattr(trainer.TaskRunnerV1.__ray_metadata__.modified_class, "run", lambda self, config: None)
    trainer.BAPOTaskRunner().run(None)
    assert registry.keys() == of_verl.keys()
    for mode, ours in registry.items():
        assert issubclass(ours, of_verl[mode]) and ours is not of_verl[mode] and get_trainer_cls(mode) is ours


def test_each_strategy_of_verls_actor_configs_is_known_here():
    """Our checks read the config's section ``megatron``."""
    known = {"fsdp", "fsdp2", "megatron", *UNSUPPORTED_STRATEGIES}
    strategies = {cls.__dataclass_fields__["strategy"].default for cls in ActorConfig.__subclasses__()}
    assert strategies <= known
    assert not McoreEngineConfig().dynamic_context_parallel
    sizes = {"rollout_n": 8, "ppo_mini_batch_size": 1, "ppo_micro_batch_size_per_gpu": 1}
    actor = McoreActorConfig(**sizes)
    assert actor.strategy == "megatron" and isinstance(actor.megatron, McoreEngineConfig)


def test_verl_has_no_remote_backend_which_our_worker_would_never_reach():
    """If a later verl has one, .github/CONTRIBUTING.md says what to refuse."""
    assert importlib.util.find_spec("verl.remote_backend") is None
    assert (
        "remote_backend" not in OmegaConf.load(Path(verl.__file__).parent / "trainer/config/ppo_trainer.yaml").trainer
    )
