"""``solrl validate``: one model on one device, compared with the stock diffusers pipeline."""
