# SPDX-License-Identifier: Apache-2.0
"""The actor's worker: it wraps verl's engine, so that each optimizer update gets its clip bounds.

verl creates this worker instead of its own ``TrainingWorker`` wherever a config of ``recipe.bapo.policy_loss`` is used,
in any trainer and with any entry point. How the bounds are found is in ``scopes.py``, the loss that uses them in
``policy_loss.py``. With a policy loss that is not ours, the worker does what verl's worker does, bit for bit.
"""

import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from tensordict import TensorDict
from torch import Tensor
from torch.distributed import ProcessGroup

import bapo
from bapo import BAPOConfig
from recipe.bapo.hook.compatibility import require_ppo_loss
from recipe.bapo.hook.marks import ON_POLICY_FIRST_UPDATE, STEP, pop_mark
from recipe.bapo.hook.monitor import Monitor
from recipe.bapo.hook.record import Record
from recipe.bapo.hook.scopes import SCOPES, Bounds, BoundScope, Measurement, bounds_metrics, tokens_of
from recipe.bapo.hook.sent_weights import SentWeights
from recipe.bapo.hook.tell import Guard, tell
from recipe.bapo.hook.verdict import EVERY, judge
from recipe.bapo.hook.verdict_inputs import verdict_inputs
from recipe.bapo.hook.verl_version import verl_version
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.workers.config import ActorConfig, TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker


class BAPOTrainingWorker(TrainingWorker):
    """verl's training worker with a search for the clip bounds of each update.

    It does four things. It replaces one method of verl's engine, ``forward_backward_batch``, and changes what that does
    inside ``train_batch`` alone: there the scope of the run makes the update. It puts the bounds into the config from
    which the loss reads them. It logs and records what was measured, and says it in a sentence. And it notes when verl
    sends weights to the rollout servers (``sent_weights.py``), from which the position of an update on its rollout
    batch follows: the forecast tells the first update on a batch from the others.
    """

    def __init__(self, config: TrainingWorkerConfig):
        super().__init__(config)
        self.begin()

    def begin(self) -> None:
        """Set what this class adds to verl's worker, whose engine is there."""
        self.verl_forward_backward_batch = self.engine.forward_backward_batch
        self.scope: BoundScope | None = None  # None: nothing is searched
        self.guard = Guard()
        self.record: Record | None = None
        self.tokens: Any = None  # a TokenFiles, whose import needs pyarrow
        self.sent_weights = SentWeights(self.engine, self.model_config)
        self.calls = 0  # of ``train_mini_batch``, since the loss was set
        self.steps = 0  # of a trainer that sets no mark: rollout batches so far, with those before a resume
        self.step: int | None = None  # of the current call
        self.updates_since_sent = 0  # since the rollout servers got their weights, which is the position on a batch
        # Whether every ratio of the next update is to be taken as 1; None: the trainer does not say.
        self.on_policy: bool | None = None
        self.updating = False  # whether ``train_batch`` runs
        self.logged: dict[str, float] = {}  # what was logged of the latest update
        self.measurement: Measurement | None = None  # of the current update, on the rank that reports
        self.since_verdict: list[dict[str, float]] = []  # what it needs of the updates since the last one

    def set_loss_fn(self, loss_fn: Callable) -> None:
        """Set verl's loss function. If its config is one of ours, wrap it and add the search to each update.

        Raises:
            ValueError: BAPO's config comes with a function other than verl's ``ppo_loss``, or with settings that would
                make the bounds or the loss wrong, or the search fail. With ``MonitorConfig`` nothing raises.
        """
        engine: Any = self.engine  # because one of its methods is replaced
        engine.forward_backward_batch = self.verl_forward_backward_batch
        self.scope = self.record = self.tokens = None
        self.guard, self.calls, self.since_verdict = Guard(), 0, []
        config: Any = loss_fn.keywords.get("config") if isinstance(loss_fn, partial) else None
        policy_loss: Any = getattr(config, "policy_loss", None)
        if isinstance(loss_fn, partial) and isinstance(policy_loss, BAPOConfig):
            self.scope = self._make_scope(loss_fn.func, config)
        elif config is None:
            name = getattr(loss_fn, "__qualname__", type(loss_fn).__qualname__)
            tell(f"nothing is measured in this run: its loss {name} is not verl's partial(ppo_loss, config=...).")
        if self.scope is None:
            super().set_loss_fn(loss_fn)
            return
        about = self.scope.about()
        if policy_loss.record_dir is not None:
            with self.guard("making the record"):
                self.record = Record(policy_loss.record_dir, policy_loss, {"verl": verl_version(), **about})
        if policy_loss.token_dir is not None and self.engine.is_mp_src_rank_with_outputs():
            with self.guard("preparing to write tokens"):
                from recipe.bapo.hook.tokens import TokenFiles

                self.tokens = TokenFiles(policy_loss.token_dir, about, self.engine.get_data_parallel_rank())
        with self.guard("saying what runs"):
            if self._reports():
                does = "trains with BAPO's bounds" if self.scope.applied else f"monitors loss_mode={about['loss_mode']}"
                target = self.scope.config.positive_contribution_target
                tell(f"bapo-verl {bapo.__version__} {does}, target {target:g}, in verl {verl_version()}.")
        engine.forward_backward_batch = partial(self._forward_backward_batch, self.scope)
        super().set_loss_fn(partial(self._compute_loss, self.scope, loss_fn, config))

    def load_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint as verl does. The steps of a resumed run are counted from that of its checkpoint."""
        steps = re.findall(r"global_step_(\d+)", str(local_path))
        self.steps = int(steps[-1]) if steps else 0
        return super().load_checkpoint(local_path, *args, **kwargs)

    def train_mini_batch(self, data: TensorDict) -> TensorDict:
        """Make all updates on one rollout batch or, in ``separate_async``, on a part of one."""
        if self.sent_weights.begin_call():
            self.updates_since_sent = 0
            self.steps += 1
        # With BAPO's loss a rank that goes on without the mark would make other collectives than the others.
        applied = self.scope is not None and self.scope.applied
        try:
            with nullcontext() if applied else self.guard("reading what the trainer says of the batch"):
                self.on_policy = pop_mark(data, ON_POLICY_FIRST_UPDATE, None)
                self.step = pop_mark(data, STEP, self.steps)
            output = super().train_mini_batch(data)
        finally:
            self.on_policy = self.step = None
        self.calls += 1
        if self.scope is not None and self.calls % EVERY == 0 and self.since_verdict:
            with self.guard("judging the measurements"):
                window = f"the last {EVERY} training calls"
                verdict = judge(self.since_verdict, self.scope.config, self.scope.about(), window)
                instead = "Lines that go back:" if self.scope.applied else "Lines that train so:"
                tell(" ".join([verdict.text, *((instead, *verdict.switch) if verdict.switch else ())]))
            self.since_verdict = []
        return output

    def train_batch(self, data: TensorDict) -> TensorDict | None:
        """Make one optimizer update."""
        self.updating, self.measurement = True, None
        place = self._place()
        try:
            output = super().train_batch(data)
        finally:
            self.updating = False
            self.on_policy = None if self.on_policy is None else False
        self.updates_since_sent += 1
        if self.scope is None:
            return output
        self.scope.finish()
        with self.guard("looking at the gradient norm"):
            if output is not None:
                metrics = tu.get(output, "metrics")
                place["grad_norm"] = metrics["grad_norm"]
                metrics["actor/bapo/skipped"] = float(self._is_skipped(self.scope, metrics["grad_norm"]))
        with self.guard("keeping what was measured"):
            if self.measurement is not None:
                self._keep(self.scope, self.measurement, place)
        return output

    def _is_skipped(self, scope: BoundScope, grad_norm: float) -> bool:
        """Whether verl has skipped the optimizer's step of an update with this gradient norm."""
        if math.isfinite(grad_norm):
            return False
        if scope.strategy != "megatron":
            return True
        # Megatron skips only with a loss scaler, and then verl raises.
        self.guard.tell_once(
            "gradient norm",
            f"the gradient norm of an update was {grad_norm}, and Megatron has made its step all the same, so weights "
            "and optimizer are broken from here on. Stop the run, and resume from a checkpoint before this step "
            "(docs/silent_faults.md).",
        )
        return False

    def _reports(self) -> bool:
        """Whether this rank is the one of all that speaks for the run and records it."""
        return self.engine.get_data_parallel_rank() == 0 and self.engine.is_mp_src_rank_with_outputs()

    def _make_scope(self, function: Callable, config: Any) -> BoundScope | None:
        """Make what measures the updates of a loss; None if it is to be monitored and cannot be."""
        cls = type(config.policy_loss)
        ours = f"actor_rollout_ref.actor.policy_loss._target_={cls.__module__}.{cls.__qualname__}"
        scope_class = SCOPES[config.policy_loss.bound_scope] if config.policy_loss.loss_mode == "bapo" else Monitor
        try:
            require_ppo_loss(function, config.policy_loss)
            return scope_class(config, self.model_config, self.engine, get_device_id(), self.guard)
        except Exception as error:
            if scope_class.applied:
                raise
            tell(f"{ours} does nothing in this run: {error} Training goes on without the monitor.")
            return None

    def _forward_backward_batch(
        self, scope: BoundScope, data: TensorDict, loss_function: Callable, forward_only: bool = False
    ) -> dict:
        """Take the place of the engine's method. Only an update's forwards and backwards differ from verl's."""
        if forward_only or not self.updating:
            return self.verl_forward_backward_batch(data, loss_function, forward_only)

        def run_pass() -> dict:
            if self.tokens is not None:
                self.tokens.begin(self.step or 0)
            return self.verl_forward_backward_batch(data, loss_function)

        output = scope.update(data, self.updates_since_sent, bool(self.on_policy), run_pass)
        self.logged = {"actor/bapo/applied": float(scope.applied), "actor/bapo/measured": 0.0}
        with self.guard("measuring an update"):
            if scope.measurement is not None:
                self.logged |= bounds_metrics(scope.measurement.metrics)  # on every rank the same keys
                self.logged["actor/bapo/measured"] = float("met_at_start" in scope.measurement.metrics)
                if self._reports():
                    self.measurement = scope.measurement
        if self.tokens is not None:
            with self.guard("writing tokens"):
                found = scope.measurement.metrics if scope.measurement is not None else {}
                bounds = (found["low"], found["high"]) if "low" in found else None
                self.tokens.write(self.step or 0, self.updates_since_sent, bounds)
        with self.guard("logging an update"):
            if self.engine.is_mp_src_rank_with_outputs():
                # Each value is a list of one element, because verl's worker gathers lists of metrics from the ranks.
                output["metrics"] |= {name: [value] for name, value in self.logged.items()}
        return output

    def _compute_loss(
        self,
        scope: BoundScope,
        loss_fn: Callable,
        config: Any,
        model_output: dict,
        data: TensorDict,
        dp_group: ProcessGroup | None = None,
    ) -> tuple[Tensor, dict]:
        """Compute verl's loss of one micro-batch, after putting the bounds into its config, where it reads them."""
        bounds = scope.latest
        if self.updating:
            bounds = scope.for_micro_batch(data, model_output["log_probs"].detach())
            if self.tokens is not None and self.tokens.wanted:
                with self.guard("reading tokens"):
                    self._add_tokens(scope, data, model_output["log_probs"].detach(), bounds)
        if not scope.applied:
            return loss_fn(model_output=model_output, data=data, dp_group=dp_group)
        config.policy_loss.current_bounds = bounds
        try:
            return loss_fn(model_output=detach_unused_entropy(model_output, config), data=data, dp_group=dp_group)
        finally:
            config.policy_loss.current_bounds = None  # a worker that finds no bounds must not use these

    def _add_tokens(self, scope: BoundScope, data: TensorDict, log_probs: Tensor, bounds: Bounds | None) -> None:
        """Add the responses of a micro-batch to those that are written of this update."""
        tokens = tokens_of(data, log_probs)
        responses = data.select("responses").to_padded_tensor()["responses"]
        self.tokens.add(responses, *tokens, scope.cut(tokens, bounds), bounds)

    def _place(self) -> dict[str, float]:
        """Return where the current update stands, as far as the trainer says it."""
        known = {"step": self.step, "on_policy": self.on_policy}
        of_trainer = {name: int(number) for name, number in known.items() if number is not None}
        return {"call": self.calls, "update": self.updates_since_sent, **of_trainer}

    def _keep(self, scope: BoundScope, measurement: Measurement, place: dict[str, float]) -> None:
        """Record an update, and keep what the next verdict needs of it."""
        inputs = verdict_inputs(measurement.stats, scope.own_clip is not None)
        self.since_verdict.append(place | measurement.metrics | {name: value.item() for name, value in inputs.items()})
        if self.record is not None:
            self.record.write(measurement.stats, measurement.metrics, **place)


def detach_unused_entropy(model_output: dict, actor_config: ActorConfig) -> dict:
    """Detach the entropy in the output of verl's forward if its coefficient in the loss is 0.

    verl subtracts 0 times the entropy from the loss, so the backward of an update that measures the entropy would hold
    a tensor of (tokens, vocabulary).
    """
    entropy = model_output.get("entropy")
    if entropy is None or actor_config.entropy_coeff != 0:
        return model_output
    return {**model_output, "entropy": entropy.detach()}
