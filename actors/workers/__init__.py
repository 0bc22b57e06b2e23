"""What runs in each actor: its role, and the card that hosts several."""
