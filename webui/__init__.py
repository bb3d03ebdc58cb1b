"""Read-only pages over projections."""
