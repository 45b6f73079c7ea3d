"""What users hold of a communicator, and what all transports share."""
