"""The update of the policy, on the ranks of the learner group."""
