# SPDX-License-Identifier: Apache-2.0
"""The clip report: what clipping does to a run, from its dumped tokens."""
