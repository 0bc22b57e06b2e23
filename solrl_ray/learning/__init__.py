"""Policy updates on the ranks of the learner group."""
