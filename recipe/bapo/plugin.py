# SPDX-License-Identifier: Apache-2.0
"""For ``actor_rollout_ref.model.external_lib=recipe.bapo.plugin``: registers the loss, and on a CPU the platform.

Nothing needs it where ``policy_loss._target_`` names our config, which does the same; runs that name it go on working.
"""

import recipe.bapo.cpu  # noqa: F401
import recipe.bapo.policy_loss  # noqa: F401
