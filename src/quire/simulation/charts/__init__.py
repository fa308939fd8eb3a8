"""Charts as SVG, without a plotting library."""
