"""Optimizers that use a reducer in other ways: sharded steps, and steps without communication."""
