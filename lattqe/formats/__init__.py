"""Importers: one file for each foreign format."""
