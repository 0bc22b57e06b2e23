"""The learner group, publication of its policy, checkpoints, handling of a collapse, timing of iterations."""
