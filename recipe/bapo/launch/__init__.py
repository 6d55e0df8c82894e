# SPDX-License-Identifier: Apache-2.0
"""The life of a run: its parent process, what the parent shows and watches, what keeps runs apart, what is cleaned up.

``__main__`` is the command, ``supervisor`` the parent's view of training, ``watchdog`` finds a run that would hang,
``cleanup`` leaves nothing behind, ``console`` is what a person reads, ``messages`` the pipe from training to its
parent, ``locks`` keep two runs from each other. Times and texts may be changed here; the kinds of messages only
together with ``main_bapo``, which sends them. The parent imports neither verl nor torch: it starts at once, and is none
of the processes that die.
"""
