"""What a step's time goes into: recorded, put together over the ranks, and shown."""
