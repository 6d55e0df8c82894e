# SPDX-License-Identifier: Apache-2.0
"""A run on its machine: the files in its folder, its claims on what two runs cannot share, and its processes.

Launcher, preflight and table import this package, and it imports none of them, nor verl, torch or hydra.
"""
