"""What people look at: figures, tables and the one HTML page of a benchmark run."""

from lattqe.report.page import render_page
from lattqe.report.tables import to_csv, to_text

__all__ = ["render_page", "to_csv", "to_text"]
