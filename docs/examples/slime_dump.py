# SPDX-License-Identifier: Apache-2.0
"""Convert the files of slime's ``--save-debug-train-data`` to a dump for the report; each becomes one update.

    python docs/examples/slime_dump.py /data/dump debug/train_*.pt && bapo-report /data/dump

slime saves the sampler's log-probs and those of the trainer before its first update on a rollout, and no later ones.
Without ``--get-mismatch-metrics`` it may leave one of the two out. So the report is about the mismatch of
sampler and trainer and, where slime saves the weights' versions, about age; it cannot show what the updates on a
rollout add. The files of ``--save-debug-rollout-data`` have no log-probs of the trainer, so they are of no use
here. No other file of ours knows the names of slime's fields.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence

from recipe.bapo.records.tokens import write_dump

NEEDED = ("rollout_log_probs", "log_probs", "advantages", "loss_masks")  # a tensor for each response
VERSIONS = "weight_versions"  # a version for each piece of a response, oldest first


def import_slime(paths: Iterable[str | Path], folder: str | Path) -> None:
    """Write the files of ``paths`` to a dump in ``folder``.

    Raises:
        ValueError: a file lacks what the report needs.
    """
    for path in paths:
        content = torch.load(path, map_location="cpu", weights_only=True)
        columns = content.get("rollout_data", {})  # of older files: a list for each field
        if "samples" in content:  # of newer files: a dict for each response
            names = set.intersection(*map(set, content["samples"]))
            columns = {name: [sample[name] for sample in content["samples"]] for name in names}
        missing = [name for name in NEEDED if name not in columns]
        if missing:
            raise ValueError(
                f"{path} lacks {', '.join(missing)}: run slime with --save-debug-train-data and "
                "--get-mismatch-metrics, and give the files of ranks that compute log-probs."
            )
        lists = [[torch.as_tensor(response).float() for response in columns[name]] for name in NEEDED]
        padded = [pad_sequence(tensors, batch_first=True) for tensors in lists]
        version = trainer_version = None
        if VERSIONS in columns:
            of_first_token = torch.tensor([int(versions[0]) for versions in columns[VERSIONS]])
            version = of_first_token[:, None].expand_as(padded[0])
            trainer_version = int(of_first_token.max())
        write_dump(folder, *padded, version=version, trainer_version=trainer_version)


if __name__ == "__main__":
    import_slime(sys.argv[2:], sys.argv[1])
