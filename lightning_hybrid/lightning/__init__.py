"""The edge to PyTorch Lightning: callback, strategy, loader, and every private name that they need."""
