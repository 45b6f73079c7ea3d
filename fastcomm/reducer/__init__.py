"""Reducer: gradients of any model, reduced during backward."""
