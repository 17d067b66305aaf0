"""What goes in: images and tokens, in an order that depends on the seed alone."""
