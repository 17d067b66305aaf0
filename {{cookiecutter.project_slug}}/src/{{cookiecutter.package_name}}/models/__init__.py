"""What is trained: networks and the LightningModules around them."""
