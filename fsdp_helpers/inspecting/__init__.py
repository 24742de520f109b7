"""Watching a training script on a few CPU ranks, and naming the failures that it doesn't report itself."""
