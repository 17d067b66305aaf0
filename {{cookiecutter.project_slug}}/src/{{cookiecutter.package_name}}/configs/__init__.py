"""Hydra configs: one file per choice, one folder per group. `train.yaml` is the place to start."""
