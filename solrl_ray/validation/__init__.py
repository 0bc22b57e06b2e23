"""``solrl validate``: compares one model on one device with the stock diffusers pipeline."""
