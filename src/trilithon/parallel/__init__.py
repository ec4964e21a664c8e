"""Who computes which part of a model: one package for each way of splitting it."""
