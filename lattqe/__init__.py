"""Learned query expansion and database-side augmentation for image retrieval."""

__version__ = "0.1.0"
