# SPDX-License-Identifier: Apache-2.0
"""Have verl train the actor with our worker, in each version of verl that has what the worker needs.

The configs in ``policy_loss.py`` call ``install_worker`` when they are built, which verl does in the actor's process
before it makes the worker. Until then nothing of verl but the config's base class is imported, so that a verl without
one of the names gets a sentence that says so.
"""

import sys
from collections.abc import Iterator
from functools import partial, wraps
from pathlib import Path
from typing import Any

import verl
from bapo import BAPOConfig
from recipe.bapo.hook.tell import tell
from recipe.bapo.hook.verl_version import RUN_WITH, verl_version

OLDER_WORKERS = ("verl.workers.fsdp_workers", "verl.workers.megatron_workers")  # of verl 0.7 and older
OF_TINKER = "verl.workers.engine_workers_tinker"  # verl's own actor of another trainer
OVERRIDDEN = ("set_loss_fn", "train_mini_batch", "train_batch", "load_checkpoint")


def install_worker() -> None:
    """Have the actors of this process train with ``BAPOTrainingWorker`` where their loss has a config of ours.

    From verl 0.9.0 on the class of the actor's worker is an attribute, which is replaced. Older versions name the class
    in their code. There the worker turns into ours when it gets its loss, so that the workers of a critic and of a
    reference model, which are of the same class, stay verl's.

    Raises:
        TypeError: verl lacks what our worker needs, or another worker is installed that does not find clip bounds.
    """
    older = [name for name in OLDER_WORKERS if name in sys.modules]
    if older:
        raise _unusable(
            f"trains with its older worker ({older[0]}), which has no place for BAPO's: set "
            "trainer.use_legacy_worker_impl=disable, or use a newer verl"
        )
    try:
        from recipe.bapo.hook.worker import BAPOTrainingWorker
        from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
    except ImportError as error:
        raise _unusable(f"lacks what BAPO's worker needs ({error})") from error
    missing = [name for name in OVERRIDDEN if not hasattr(TrainingWorker, name)]
    if missing:
        raise _unusable(f"has no TrainingWorker.{missing[0]}, which BAPO's worker overrides")
    if hasattr(ActorRolloutRefWorker, "actor_worker_cls"):
        _refuse_other_workers(ActorRolloutRefWorker, TrainingWorker, BAPOTrainingWorker)
        if not issubclass(ActorRolloutRefWorker.actor_worker_cls, BAPOTrainingWorker):  # or one derived from it
            ActorRolloutRefWorker.actor_worker_cls = BAPOTrainingWorker
    else:
        _turn_workers_into(BAPOTrainingWorker, TrainingWorker)


def _unusable(reason: str) -> TypeError:
    folder = Path(str(verl.__file__)).parent
    return TypeError(
        f"verl {verl_version()} in {folder} {reason}; {RUN_WITH}. With any verl python -m recipe.bapo.report reads "
        "the log of a run."
    )


def _refuse_other_workers(actor: type, of_verl: type, ours: type) -> None:
    """Refuse an actor of verl, or of a fork, whose worker is neither verl's nor ours.

    Tinker's is not checked, because a process may import it without using it. If its worker calls the loss, the loss
    refuses.
    """
    for cls in (actor, *subclasses_of(actor)):
        # The nearest class that sets the attribute; that of verl's actor is replaced.
        setter = next(one for one in cls.__mro__ if "actor_worker_cls" in vars(one))
        own = vars(setter)["actor_worker_cls"]
        usable = issubclass(own, ours) or (setter is actor and own is of_verl)
        if not usable and cls.__module__ != OF_TINKER:
            raise _other_worker(f"{cls.__qualname__} has actor_worker_cls={own.__qualname__}")


def _other_worker(which: str) -> TypeError:
    return TypeError(
        f"{which}, which does not find clip bounds: derive that class from recipe.bapo.hook.worker.BAPOTrainingWorker."
    )


def _turn_workers_into(ours: Any, of_verl: Any) -> None:
    """Have each worker of verl turn into ours when it gets a loss with a config of ours."""
    set_loss_fn = of_verl.set_loss_fn
    if hasattr(set_loss_fn, "of_verl"):
        return

    @wraps(set_loss_fn)  # with the attributes by which verl calls the method in other processes
    def turn_and_set(worker: Any, loss_fn: Any) -> None:
        config = loss_fn.keywords.get("config") if isinstance(loss_fn, partial) else None
        policy_loss: Any = getattr(config, "policy_loss", None)
        has_our_config = isinstance(policy_loss, BAPOConfig)
        if not has_our_config or isinstance(worker, ours):
            set_loss_fn(worker, loss_fn)
        elif type(worker) is of_verl and of_verl.__module__ == "verl.workers.engine_workers":
            worker.__class__ = ours
            worker.begin()
            worker.set_loss_fn(loss_fn)
        else:
            error = _other_worker(f"the actor's worker is {type(worker).__module__}.{type(worker).__qualname__}")
            if policy_loss.loss_mode == "bapo":
                raise error
            tell(f"MonitorConfig does nothing in this run: {error} Training goes on without the monitor.")
            set_loss_fn(worker, loss_fn)

    replacement: Any = turn_and_set
    replacement.of_verl = set_loss_fn
    of_verl.set_loss_fn = replacement


def subclasses_of(cls: type) -> Iterator[type]:
    """Yield all classes that inherit from a class, at any depth."""
    subclasses: list[type] = cls.__subclasses__()
    for subclass in subclasses:
        yield subclass
        yield from subclasses_of(subclass)
