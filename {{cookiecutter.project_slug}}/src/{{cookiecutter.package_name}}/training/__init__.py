"""How it is trained: the choices for the machine and the loop around the model."""
