"""How it is trained: the choices, the run folder, the checkpoints and the loop around the model."""
