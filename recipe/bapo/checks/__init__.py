# SPDX-License-Identifier: Apache-2.0
"""What can be known to be wrong before a cluster is started. Each message names the field, the value and the fix."""


class Concern(Exception):
    """A warning: it will run, and may do something that was not wanted. A ``ValueError`` is a failure."""
