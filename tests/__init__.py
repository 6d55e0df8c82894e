# SPDX-License-Identifier: Apache-2.0
"""Tests of the repository. They are not part of the package."""
