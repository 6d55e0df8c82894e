# SPDX-License-Identifier: Apache-2.0
"""``python -m recipe.bapo.report DUMP``; also installed as the command ``bapo-report``."""

from recipe.bapo.report.command import main

if __name__ == "__main__":
    main()
