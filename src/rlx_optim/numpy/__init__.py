"""The NumPy front end: one object steps a whole model, its state kept by parameter name."""
