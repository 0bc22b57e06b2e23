"""What a user sees of a run: live terminal view, TensorBoard events, pictures, summary and HTML report."""
