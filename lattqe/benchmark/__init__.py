"""Benchmark runs: what to measure (a TOML file), cells of results, and the paper's tables and figures made of them."""
