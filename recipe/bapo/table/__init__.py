# SPDX-License-Identifier: Apache-2.0
"""Turn runs into a table of methods: ``python -m recipe.bapo.table``. It reads files alone, and needs no verl.

``runs`` reads runs and groups them by method, ``scores`` computes means and intervals, ``tables`` writes them as
markdown and lists what does not fit, ``curves`` draws them.
"""
