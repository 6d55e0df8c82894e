"""What can be known to be wrong before a cluster is started. Each message names the field, the value and the fix."""


class Concern(Exception):
    """What will run, but perhaps not as meant: a warning, where a ``ValueError`` is a failure."""
