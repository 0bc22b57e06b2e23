"""What an evaluation samples and measures, and what is concluded from it."""
