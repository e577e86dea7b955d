"""Errors that a user can fix. Each message is one line: what was wrong, the value, and the remedy."""


class LattqeError(Exception):
    """Bad input, a missing artifact, a refused overwrite: jobs print the message and exit with code 2."""


class CorruptDataError(LattqeError):
    """Stored bytes that are not what their manifest says; the message names the part."""


class AlreadyExistsError(LattqeError):
    """Somebody else published first, or the destination is taken by another configuration."""
