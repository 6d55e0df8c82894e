# SPDX-License-Identifier: Apache-2.0
"""How our worker gets into verl, in each version that has a place for it, and what a user is told where it cannot.

Conditions of a user's run that these tests have: verl builds the configs from ``_target_``, as in its actor. They lack:
another verl, for which a test takes names away from this one (scripts/try_verl.sh runs real ones), and Ray.
"""

import importlib.metadata
import subprocess
import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
from omegaconf import OmegaConf
from support.actor import actor_config
from support.batches import make_batch
from support.stand_in import MODEL, StandInEngine, make_worker, update
from support.versions import from_0_9

import verl
from recipe.bapo.hook.record import read_start
from recipe.bapo.hook.verl_version import RUN_WITH, verl_version
from recipe.bapo.hook.worker import BAPOTrainingWorker
from recipe.bapo.policy_loss import BAPOPolicyLossConfig, MonitorConfig
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import MAGIC_ATTR
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import PolicyLossConfig
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.utils.losses import ppo_loss, value_loss


def build(config):
    """Build a config of ours as verl does in the actor."""
    target = {"_target_": f"recipe.bapo.policy_loss.{config}"}
    return omega_conf_to_dataclass(OmegaConf.create(target | ({"loss_mode": "bapo"} if "BAPO" in config else {})))


@pytest.fixture
def older_verl(monkeypatch):
    """Take from verl what 0.8.0 does not have, and undo what our code replaces."""
    monkeypatch.delattr(ActorRolloutRefWorker, "actor_worker_cls", raising=False)
    of_verl = TrainingWorker.set_loss_fn  # or ours, if another test has built a config with an older verl
    monkeypatch.setattr(TrainingWorker, "set_loss_fn", getattr(of_verl, "of_verl", of_verl))


@from_0_9
@pytest.mark.parametrize("config", ["BAPOPolicyLossConfig", "MonitorConfig"])
def test_the_configs_have_verl_make_our_worker(monkeypatch, config):
    monkeypatch.setattr(ActorRolloutRefWorker, "actor_worker_cls", TrainingWorker)
    build(config)
    assert ActorRolloutRefWorker.actor_worker_cls is BAPOTrainingWorker is DetachActorWorker.actor_worker_cls


@from_0_9
def test_a_worker_that_is_derived_from_ours_stays(monkeypatch):
    derived = type("Derived", (BAPOTrainingWorker,), {})
    monkeypatch.setattr(ActorRolloutRefWorker, "actor_worker_cls", derived)
    build("MonitorConfig")
    assert ActorRolloutRefWorker.actor_worker_cls is derived


def make_config_after(statements):
    """Return the error of ``BAPOPolicyLossConfig()`` in a new process, because Python never forgets a subclass."""
    code = f"{statements}\nfrom recipe.bapo.policy_loss import *\nBAPOPolicyLossConfig()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return done.stderr.splitlines()[-1] if done.returncode else "nothing"


@from_0_9
@pytest.mark.parametrize(
    "module, statements, named",
    [
        ("mine", "class Mine(ActorRolloutRefWorker): actor_worker_cls = Other", "Mine has actor_worker_cls=Other"),
        ("mine", "class Between(Tinker): pass\nclass Mine(Between): actor_worker_cls = Other", "Between has actor_w"),
        # A fork sets the attribute in verl's own files, or derives another actor there.
        ("verl.workers.forked", "ActorRolloutRefWorker.actor_worker_cls = Other", "orker has actor_worker_cls=Other"),
        (
            "verl.workers.forked",
            "class Fork(ActorRolloutRefWorker): actor_worker_cls = Other",
            "Fork has actor_worker_",
        ),
    ],
)
def test_another_worker_is_named_and_not_replaced(module, statements, named):
    error = make_config_after(
        "from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker\n"
        "from verl.workers.engine_workers_tinker import TinkerActorRolloutRefWorker as Tinker\n"
        f"__name__ = {module!r}\nclass Other(TrainingWorker): pass\n{statements}"
    )
    assert error.startswith("TypeError: ") and named in error


@from_0_9
def test_a_worker_that_inherits_the_training_worker_and_verls_own_for_tinker_are_accepted():
    code = "from verl.workers.engine_workers import *\nfrom verl.workers import engine_workers_tinker\n"
    assert make_config_after(f"{code}class MyWorker(ActorRolloutRefWorker): pass") == "nothing"


def make_verls_worker(cls, monkeypatch):
    """Make a worker of verl's class, or of one that inherits it, on a stand-in engine."""
    make_worker(actor_config(BAPOPolicyLossConfig()), monkeypatch)  # replaces the parts of verl's class
    worker = cls.__new__(cls)
    worker.engine, worker.model_config, worker.loss_fn = StandInEngine(), MODEL, None
    return worker


@pytest.mark.parametrize("config, applied", [("BAPOPolicyLossConfig", 1), ("MonitorConfig", 0)])
def test_an_older_verls_worker_turns_into_ours_with_its_loss(monkeypatch, older_verl, config, applied):
    worker = make_verls_worker(TrainingWorker, monkeypatch)
    expected = update(make_worker(actor_config(build(config)), monkeypatch), make_batch(1))
    for _ in range(2):  # verl builds the config in the driver as well, which may be this process
        build(config)
    worker.set_loss_fn(partial(ppo_loss, config=actor_config(build(config))))
    assert type(worker) is BAPOTrainingWorker
    found = update(worker, make_batch(1))
    assert found == expected and found["actor/bapo/applied"] == [applied]


def test_workers_of_a_critic_and_of_other_losses_stay_verls(monkeypatch, older_verl):
    build("BAPOPolicyLossConfig")
    losses = partial(value_loss, config=SimpleNamespace()), partial(ppo_loss, config=actor_config(PolicyLossConfig()))
    for loss in (*losses, ppo_loss):
        worker = make_verls_worker(TrainingWorker, monkeypatch)
        worker.set_loss_fn(loss)
        assert type(worker) is TrainingWorker and worker.loss_fn is loss


def test_other_processes_can_still_call_the_replaced_method(older_verl):
    """verl's worker groups find a method by the attributes that its decorator has set."""
    original = TrainingWorker.set_loss_fn
    build("MonitorConfig")
    replaced = TrainingWorker.set_loss_fn
    assert replaced is not original and getattr(replaced, MAGIC_ATTR) is getattr(original, MAGIC_ATTR)


class Foreign(TrainingWorker):
    """A worker of somebody else's."""


def test_a_foreign_worker_of_an_older_verl_is_refused_or_told(monkeypatch, capsys, older_verl):
    worker = make_verls_worker(Foreign, monkeypatch)
    with pytest.raises(TypeError, match="worker is test_install.Foreign"):
        worker.set_loss_fn(partial(ppo_loss, config=actor_config(build("BAPOPolicyLossConfig"))))
    loss = partial(ppo_loss, config=actor_config(build("MonitorConfig")))
    worker.set_loss_fn(loss)
    assert type(worker) is Foreign and worker.loss_fn is loss
    assert "MonitorConfig does nothing in this run" in capsys.readouterr().err


MISSING = ["verl.workers.engine_workers", "verl.workers.engine.base", "verl.utils.device"]  # our worker imports them


def take_away(monkeypatch, name):
    """Take from verl a module, a method of its worker, or its newer workers."""
    if name in MISSING:
        kept = ("recipe.bapo.hook.install", "recipe.bapo.hook.tell")
        ours = [one for one in sys.modules if one.startswith("recipe.bapo.hook.") and one not in kept]
        for module in (name, *ours):  # so that ours are imported again
            package, _, attribute = module.rpartition(".")
            monkeypatch.delattr(sys.modules[package], attribute)
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setitem(sys.modules, name, None)
    elif name == "verl.workers.fsdp_workers":
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    else:
        monkeypatch.delattr(TrainingWorker, name)


@pytest.mark.parametrize("name", [*MISSING, "verl.workers.fsdp_workers", "train_mini_batch"])
def test_a_verl_that_lacks_something_gets_a_sentence(monkeypatch, capsys, name):
    take_away(monkeypatch, name)
    with pytest.raises(TypeError) as refused:
        BAPOPolicyLossConfig()
    text = str(refused.value)
    assert text.startswith(f"verl {verl.__version__} in ") and name in text and RUN_WITH in text
    assert "recipe.bapo.report" in text and "\n" not in text
    assert isinstance(build("MonitorConfig"), MonitorConfig)  # and training goes on
    assert f"BAPO: MonitorConfig does nothing in this run: {text}" in capsys.readouterr().err


@pytest.mark.parametrize("version", ["0.10.0.dev0", "fork-of-ours", None])
def test_any_version_text_and_no_metadata_will_do(monkeypatch, capsys, tmp_path, version):
    def not_found(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata.Distribution, "from_name", not_found)
    monkeypatch.setattr(verl, "__version__", version) if version else monkeypatch.delattr(verl, "__version__")
    config = MonitorConfig(record_dir=str(tmp_path))
    worker = make_worker(actor_config(config), monkeypatch)
    update(worker, make_batch(1))
    expected = version or "of an unknown version"
    assert verl_version() == expected and read_start(next(tmp_path.iterdir())).about["verl"] == expected
    told = capsys.readouterr().err
    assert f"in verl {expected}." in told and "failed" not in told
