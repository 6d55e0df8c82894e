# SPDX-License-Identifier: Apache-2.0
"""For ``actor_rollout_ref.model.external_lib=recipe.bapo.plugin``: registers the loss, and on a CPU the platform.

It is not needed: ``policy_loss._target_`` brings the loss and the entry point ``verl.plugins`` the platform. It is kept
for runs that name it.
"""

import recipe.bapo.cpu  # noqa: F401
import recipe.bapo.policy_loss  # noqa: F401
