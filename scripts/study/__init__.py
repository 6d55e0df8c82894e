# SPDX-License-Identifier: Apache-2.0
"""The study on the language model: which method learns fastest, and how much each clips."""
