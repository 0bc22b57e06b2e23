"""What a revision of the policy is, how it is made, sent and proved."""
