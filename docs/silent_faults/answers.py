# SPDX-License-Identifier: Apache-2.0
"""Count right answers in a box that got no reward from verl's math_dapo: python answers.py ROLLOUTS/*.jsonl.

The files are those of trainer.rollout_data_dir or trainer.validation_data_dir.
"""

import fileinput
import json
import sys

from verl.utils.reward_score.math_dapo import last_boxed_only_string, normalize_final_answer, remove_boxed

rows = unrewarded = 0
for row in map(json.loads, fileinput.input(sys.argv[1:], encoding="utf-8")):
    rows += 1
    box = last_boxed_only_string(row["output"])
    right = box and normalize_final_answer(remove_boxed(box)) == normalize_final_answer(row["gts"])
    unrewarded += bool(right) and row["score"] <= 0
print(unrewarded, "of", rows, "have the right answer in a box and no reward")
