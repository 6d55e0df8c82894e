# SPDX-License-Identifier: Apache-2.0
"""The old name of ``python -m recipe.bapo.report``, for one version more."""

import sys

from recipe.bapo.report.__main__ import main

if __name__ == "__main__":
    print("python -m recipe.bapo.replay is now python -m recipe.bapo.report.", file=sys.stderr)
    main()
