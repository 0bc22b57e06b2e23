"""The learner group, the publishing of its policy, checkpoints, what follows a collapse, an iteration's clock."""
