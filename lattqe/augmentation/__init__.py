"""Augmented indexes: building one, what made it, whether it is what that makes, and what changes when it grows."""
