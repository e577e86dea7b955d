"""What people look at: figures, tables and the HTML pages of benchmark runs."""

from lattqe.report.page import (
    density_csv,
    density_illustrations,
    density_text,
    illustrations,
    render_density,
    render_page,
)
from lattqe.report.views import to_csv, to_text

__all__ = [
    "density_csv",
    "density_illustrations",
    "density_text",
    "illustrations",
    "render_density",
    "render_page",
    "to_csv",
    "to_text",
]
