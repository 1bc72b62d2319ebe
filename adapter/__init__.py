"""The binding of a trainer class, a job and a feed to PyTorch Lightning."""
