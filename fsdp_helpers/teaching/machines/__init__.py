"""Other places where ranks run: torchrun, Slurm, PyTorch/XLA."""
