"""Sampling, from noise to a latent: addressed random numbers, noise levels, solvers."""
