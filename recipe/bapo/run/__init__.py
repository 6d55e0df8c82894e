# SPDX-License-Identifier: Apache-2.0
"""The launcher: what happens before, during and after training. A run has these processes, and each its modules:

- **The command** ``recipe.bapo.run.start``, which the run script calls: it looks at the ``machine``, names the
  experiment, size and platform that the command leaves out, and sets the variables that the yaml files read. It then
  becomes the parent; or the command of preflight; or the one that submits the run to a Ray cluster, where the parent
  then starts.
- **The parent** ``recipe.bapo.run``: ``__main__`` claims the run's folder, starts the training process, follows it and
  cleans up after it. ``console`` prints for the user, ``watchdog`` detects a run that hangs. The parent imports neither
  verl nor torch, so that it starts at once, and an error in one of them cannot end it. ``dynamics`` draws in a process
  of its own.
- **The training process** ``recipe.bapo.main_bapo``, a child of the parent: ``train`` checks the run, claims the
  machine (and the folder, if there is no parent), and starts Ray; ``messages`` is its end of the pipe to the parent.
- **The task runner**, an actor of Ray: ``task_runner`` claims the cluster. verl's trainer runs in it, and starts the
  workers.

``recipe.bapo.preflight`` checks the config, what it names, and the machine: in the training process, or as a command of
its own. Several processes use the modules of ``recipe.bapo.host``: ``locks`` has the claims, which refuse a second run
where two would disturb each other; ``cleanup`` ends processes and removes leftovers; ``files`` and ``metrics`` know the
files of a run. ``bapo_run`` is what the launcher knows of the trainer and its metrics.
"""
