"""The planner: what a model would do on hardware that nobody has rented yet, and which layout to choose."""
