# SPDX-License-Identifier: Apache-2.0
"""The old name of ``recipe.bapo.report``, for one version more."""

import sys

if __name__ == "__main__":
    sys.exit("Error: python -m recipe.bapo.replay is now python -m recipe.bapo.report.")
