# SPDX-License-Identifier: Apache-2.0
"""What happens before, during and after training: ``python -m recipe.bapo.run`` checks, starts and follows a run.

``start`` is the command of the run script, and ``choose`` chooses for it what is left open: config, size, model and
data, and the number of GPUs.
``__main__`` is the command and the parent process of a run. ``preflight`` checks the config, what it names, and the
machine. ``console`` prints for the user; ``watchdog`` detects a run that hangs, and ``demands`` shows what Ray cannot
place; ``locks`` refuses a second run if two would disturb each other; ``cleanup`` ends processes and removes
leftovers; ``picture`` draws. ``messages`` is training's end of the pipe to the parent; ``files`` and ``metrics`` know
the files of a run. The parent imports neither verl nor torch, so that it starts at once, and an error in one of them
cannot end it.
"""
