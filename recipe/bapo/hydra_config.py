"""What Hydra must know before it composes our configs. Imported by the plugin, so by everything that imports verl."""

from dataclasses import asdict

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

from bapo import BAPOConfig
from recipe.bapo.policy_loss import BAPOPolicyLossConfig


class BAPOSearchPath(SearchPathPlugin):
    """Finds verl's configs and ours from any primary config; Hydra lets only a primary config name search paths."""

    def manipulate_search_path(self, search_path):
        """Append both packages."""
        search_path.append("verl", "pkg://verl.trainer.config")
        search_path.append("bapo", "pkg://recipe.bapo.config")


Plugins.instance().register(BAPOSearchPath)

# The switches as a node of bapo_trainer.yaml: their defaults live in the dataclasses alone.
ConfigStore.instance().store(
    group="bapo",
    name="policy_loss",
    node={
        "_target_": f"{BAPOPolicyLossConfig.__module__}.{BAPOPolicyLossConfig.__name__}",
        "loss_mode": BAPOPolicyLossConfig.loss_mode,
        **asdict(BAPOConfig()),
        "bounds_record_dir": BAPOPolicyLossConfig.bounds_record_dir,
    },
)
