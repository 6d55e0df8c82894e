"""What Hydra must know before it composes our configs. Imported by the plugin, so by everything that imports verl."""

from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf


class BAPOSearchPath(SearchPathPlugin):
    """Finds verl's configs and ours from any primary config; Hydra lets only a primary config name search paths."""

    def manipulate_search_path(self, search_path):
        """Append both packages."""
        search_path.append("verl", "pkg://verl.trainer.config")
        search_path.append("bapo", "pkg://recipe.bapo.config")


Plugins.instance().register(BAPOSearchPath)


def mini_batch_size(train_batch_size: int, ppo_epochs: int, staleness: int) -> int:
    """Prompts per update so that a rollout batch makes ``staleness`` updates.

    Raises:
        ValueError: it is not a whole number.
    """
    for name, value in (
        ("data.train_batch_size", train_batch_size),
        ("ppo_epochs", ppo_epochs),
        ("staleness", staleness),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} is not usable: give a whole number of 1 or more.")
    size, rest = divmod(train_batch_size * ppo_epochs, staleness)
    if rest:
        raise ValueError(
            f"The updates per rollout batch (staleness, or parameter_sync_step), {staleness}, do not divide "
            f"data.train_batch_size * ppo_epochs = {train_batch_size * ppo_epochs}: choose a divisor."
        )
    return size


OmegaConf.register_new_resolver("bapo.mini_batch_size", mini_batch_size, replace=True)
