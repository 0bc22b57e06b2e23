"""Which worker does what, and what counts; pure, without clocks or Ray."""
