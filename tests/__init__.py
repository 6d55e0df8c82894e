# SPDX-License-Identifier: Apache-2.0
"""Commands of the repository that are no part of the package."""
