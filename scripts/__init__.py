# SPDX-License-Identifier: Apache-2.0
"""Commands of the repository that are not part of the package."""
