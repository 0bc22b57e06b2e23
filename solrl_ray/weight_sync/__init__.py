"""What a revision of the policy is, how it is made, sent and proved, and what roles of a card share."""
