"""Data sets: revisited Oxford and Paris, SfM-120k, labelled photographs, the synthetic landmark world."""
