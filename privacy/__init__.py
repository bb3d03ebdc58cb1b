"""Keys, certificates and tokens as values: no IO, no clocks, no torch."""
