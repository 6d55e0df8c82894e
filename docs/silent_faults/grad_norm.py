# SPDX-License-Identifier: Apache-2.0
"""Print the steps whose gradient norm is not finite: python grad_norm.py metrics.jsonl, of verl's file logger.

The logger writes NaN and infinity as null.
"""

import json
import sys

with open(sys.argv[1]) as lines:
    for row in map(json.loads, lines):
        if row["data"].get("actor/grad_norm", 0.0) is None:
            print("step", row["step"])
