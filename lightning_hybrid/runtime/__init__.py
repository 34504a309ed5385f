"""Acts: the store, the claims, the loader, timing, metrics and results."""
