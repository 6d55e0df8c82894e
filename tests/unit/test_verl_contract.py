# SPDX-License-Identifier: Apache-2.0
"""What we rely on in verl 0.9.1, so that another version fails here with a name and not in a cluster."""

import inspect

import verl
from recipe.bapo.main_bapo import TaskRunnerOnThisNode
from recipe.bapo.trainer import TRAINERS
from recipe.bapo.worker import BAPOTrainingWorker
from verl.trainer import main_ppo
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.v1 import get_trainer_cls, trainer_base
from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers import engine_workers
from verl.workers.engine.base import BaseEngine
from verl.workers.utils import losses


def parameters(function):
    return list(inspect.signature(function).parameters)


def test_the_version_is_the_one_that_was_read():
    required = (inspect.getsourcefile(BAPOTrainingWorker).rsplit("/", 1)[0]) + "/REQUIRED_VERL.txt"
    assert verl.__version__ == "0.9.1" and "verl==0.9.1" in open(required).read()


def test_the_policy_loss_is_called_with_these_keywords():
    keywords = ["old_log_prob", "log_prob", "advantages", "response_mask", "loss_agg_mode", "config"]
    assert parameters(core_algos.compute_policy_loss_vanilla) == [*keywords, "rollout_is_weights"]
    assert parameters(core_algos.get_policy_loss_fn("bapo"))[:7] == [*keywords, "rollout_is_weights"]
    assert parameters(losses.ppo_loss) == ["config", "model_output", "data", "dp_group"]
    assert "get_policy_loss_fn(loss_mode)" in inspect.getsource(losses.ppo_loss)


def test_the_engine():
    assert parameters(BaseEngine.infer_batch) == ["self", "data", "loss_function"]
    assert parameters(BaseEngine.train_batch) == ["self", "data", "loss_function"]
    assert "backend" in parameters(initialize_global_process_group_ray)


def test_an_update_calls_the_engine_once_the_batch_says_how_it_is_cut():
    source = inspect.getsource(engine_workers.TrainingWorker.train_batch)
    cut = source.index("max_token_len_per_gpu=self.engine_config.max_token_len_per_gpu")
    loaded = source.index("self.engine.train_mode(")
    assert cut < loaded < source.index("self.engine.train_batch(data, loss_function=self.loss_fn)")


def test_the_actor_is_built_from_a_class_attribute_and_its_loss_is_a_partial_with_the_config():
    source = inspect.getsource(engine_workers.ActorRolloutRefWorker.init_model)
    assert "self.actor_worker_cls(" in source and "partial(ppo_loss, config=actor_config)" in source
    # The actor's config, which brings our worker, is built before the class is read.
    assert source.index("omega_conf_to_dataclass(self.config.actor)") < source.index("self.actor_worker_cls(")


def test_each_mode_gets_our_trainer_on_top_of_its_own():
    assert TRAINERS.keys() == trainer_base.TRAINER_REGISTRY.keys()
    for mode, ours in TRAINERS.items():
        assert issubclass(ours, get_trainer_cls(mode)) and ours is not get_trainer_cls(mode)


def test_validation_hands_over_every_response():
    names = ["self", "data_sources", "sample_uids", "reward_extra_infos_dict"]
    assert parameters(trainer_base.PPOTrainer._val_metrics_update)[:4] == names
    assert 'reward_extra_infos_dict["reward"]' in inspect.getsource(trainer_base.PPOTrainer._validate)


def test_the_task_runner():
    source = inspect.getsource(main_ppo.TaskRunnerV1.__ray_metadata__.modified_class.run)
    assert "get_trainer_cls(config.trainer.v1.trainer_mode)" in source
    assert hasattr(trainer_base, "TRAINER_REGISTRY")
    assert "task_runner_class.remote()" in inspect.getsource(main_ppo.run_ppo) and hasattr(
        TaskRunnerOnThisNode, "remote"
    )
