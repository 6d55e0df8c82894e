# SPDX-License-Identifier: Apache-2.0
"""The old place of ``scripts/prepare_data.py``, for one version more."""

import sys

if __name__ == "__main__":
    sys.exit("Error: python -m recipe.bapo.prepare_data is now python scripts/prepare_data.py, in the repository.")
