"""What plans cost and which is best: profiles of the hardware and of the model, prices, search."""
