# SPDX-License-Identifier: Apache-2.0
"""Turn runs into a table of methods: ``python -m recipe.bapo.table``. It reads files alone, and needs no verl.

``runs`` reads runs and groups them by method, ``statistics`` makes means and intervals, ``tables`` writes them as
markdown and csv, ``picture`` draws the curves.
"""
